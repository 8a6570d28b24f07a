import torch

from torchboost.core.memory_layout import aligned, same_layout


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
