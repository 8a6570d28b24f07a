import torch
from hypothesis import given
from hypothesis import strategies as st

from torchboost.optim.memory_layout import aligned, is_dense, same_layout, writable


def test_strides_of_axes_of_length_one_mean_nothing():
    plain = torch.randn(4, 1, 1, 1)
    last = plain.to(memory_format=torch.channels_last)
    odd = plain.as_strided((4, 1, 1, 1), (1, 7, 9, 11))
    assert same_layout(plain, last)
    assert same_layout(odd, plain)
    assert aligned(odd, plain) is odd


def test_a_copy_is_made_only_where_the_layout_differs():
    model = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 4, 5)
    got = aligned(value, model)
    assert got is not value
    assert torch.equal(got, value)
    assert got.stride() == model.stride()
    assert aligned(got, model) is got


def test_the_dtype_is_that_of_the_value():
    model = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    assert aligned(torch.randn(2, 3, 4, 5), model).dtype == torch.float32


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_order_in_memory(shape, data):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    axes = data.draw(st.permutations(range(len(shape))))
    turned = tensor.permute(axes)
    assert is_dense(turned)
    plain = turned.contiguous()
    flat = (turned.as_strided((turned.numel(),), (1,)), plain.flatten())
    assert not same_layout(turned, plain) or torch.equal(*flat)
    assert same_layout(turned, torch.empty_like(turned))


def test_gaps_are_seen():
    assert not is_dense(torch.zeros(4, 6)[:, ::2])
    assert not is_dense(torch.zeros(3).expand(2, 3))
    assert is_dense(torch.zeros(4, 6)[1:3])
    assert is_dense(torch.zeros(()))


def test_a_copy_is_made_only_where_numbers_share_memory():
    for tensor in (torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(4, 6)[:, ::2], torch.eye(3).to_sparse()):
        assert writable(tensor) is tensor
    expanded = torch.ones(1, 2).expand(3, 2)
    copied = writable(expanded)
    assert torch.equal(copied, expanded)
    copied.mul_(2)
    assert bool((expanded == 1).all())
