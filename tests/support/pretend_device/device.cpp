// A pretend CUDA device for tests. It takes the place of CUDA in a build of torch that has it.
//
// Its memory is memory of the host, and it has no kernels of its own: an operator on tensors of the device runs the
// kernel of the CPU on views of the same memory. Before that it is checked as a real device checks it: tensors of the
// CPU that have dimensions, and generators of the CPU, are refused. There are no sparse tensors.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

// ---------------------------------------------------------------------------------------------------------------------
// One device with one stream, on which everything is done at once.

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  Guard() = default;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const override { return STREAM; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---------------------------------------------------------------------------------------------------------------------
// Memory of the device, which is counted, and pinned memory of the host, whose addresses are known.

std::atomic<int64_t> allocated{0};

struct Block {
  void* data;
  int64_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= block->size;
  std::free(block->data);
  delete block;
}

struct DeviceMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&data, 512, size) == 0, "the pretend device is out of memory");
    allocated += static_cast<int64_t>(size);
    return {data, new Block{data, static_cast<int64_t>(size)}, &free_block, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_memory);

struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto data = c10::GetCPUAllocator()->allocate(size);
    const std::lock_guard<std::mutex> lock(mutex);
    addresses.insert(data.get());
    return data;
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool holds(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex);
    return addresses.count(address) > 0;
  }
  std::mutex mutex;
  std::set<const void*> addresses;
};
PinnedMemory pinned_memory;

// ---------------------------------------------------------------------------------------------------------------------
// A generator of the device draws the numbers of a generator of the CPU that it owns.

struct DeviceGenerator final : public c10::GeneratorImpl {
  DeviceGenerator() : c10::GeneratorImpl(DEVICE, KEYS), host(at::detail::createCPUGenerator()) {}

  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }
  static at::Generator& host_of(const at::Generator& of) {
    return static_cast<DeviceGenerator*>(of.unsafeGetGeneratorImpl())->host;
  }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu(), "RNG state must be a torch.ByteTensor of the CPU, found ", state.device());
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator();
    made->host = host.clone();
    return made;
  }
  at::Generator host;
};

at::Generator& default_generator() {
  static auto generator = at::make_generator<DeviceGenerator>();
  return generator;
}

} // namespace

// The registry of hooks wants a type of namespace at.
namespace at {

struct PretendHooks final : public CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<DeviceGenerator>(); }
  bool isPinnedPtr(const void* address) const override { return pinned_memory.holds(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  std::string showConfig() const override { return "a pretend device"; }
};
const bool registered = [] {
  CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](CUDAHooksArgs args) -> std::unique_ptr<CUDAHooksInterface> { return std::make_unique<PretendHooks>(args); },
      c10::REGISTRY_PREFERRED);
  return true;
}();

} // namespace at

namespace {

using at::Tensor;

// ---------------------------------------------------------------------------------------------------------------------
// The same memory as a tensor of the other device.

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

c10::DataPtr keep_alive(const c10::Storage& storage, c10::Device device) {
  return {const_cast<void*>(storage.data()), new c10::Storage(storage), &drop_storage, device};
}

Tensor over(const c10::Storage& storage, const Tensor& like, c10::Device device) {
  const auto keys = device.is_cpu() ? c10::DispatchKeySet(c10::DispatchKey::CPU) : KEYS;
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

Tensor on_device(const Tensor& tensor, c10::Device device) {
  c10::Allocator* allocator = device.is_cpu() ? c10::GetCPUAllocator() : &device_memory;
  const auto& storage = tensor.storage();
  const c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage.nbytes(), keep_alive(storage, device), allocator, true);
  return over(shared, tensor, device);
}

Tensor on_host(const Tensor& tensor) { return tensor.is_cuda() ? on_device(tensor, at::kCPU) : tensor; }

// The tensors of one call on the device with their counterparts on the host. Views of one memory stay such.
class Counterparts {
 public:
  Tensor host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    for (const auto& [device, host] : pairs_) {
      if (device.is_same(tensor)) {
        return host;
      }
    }
    const auto* sibling = sharing(tensor, &Pair::first);
    auto made = sibling ? over(sibling->second.storage(), tensor, at::kCPU) : on_device(tensor, at::kCPU);
    pairs_.emplace_back(tensor, made);
    return made;
  }

  Tensor device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) {
      return tensor;
    }
    for (const auto& [device, host] : pairs_) {
      if (host.is_same(tensor)) {
        return device;
      }
    }
    const auto* sibling = sharing(tensor, &Pair::second);
    return sibling ? over(sibling->first.storage(), tensor, DEVICE) : on_device(tensor, DEVICE);
  }

  // Give tensors of the device the shape and memory that the call gave their counterparts.
  void take_over_resized() {
    for (const auto& [device, host] : pairs_) {
      if (host.storage().data() != device.storage().data()) {
        auto storage = device.storage();
        storage.set_nbytes(host.storage().nbytes());
        storage.set_data_ptr_noswap(keep_alive(host.storage(), DEVICE));
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides()) {
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

 private:
  using Pair = std::pair<Tensor, Tensor>;

  const Pair* sharing(const Tensor& tensor, Tensor Pair::* side) const {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    for (const auto& pair : pairs_) {
      if ((pair.*side).storage().unsafeGetStorageImpl() == storage) {
        return &pair;
      }
    }
    return nullptr;
  }

  std::vector<Pair> pairs_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Every operator without a kernel below.

const std::set<std::string> TAKE_BOTH_DEVICES = {
    "aten::copy_",         "aten::_copy_from",    "aten::index.Tensor",         "aten::_unsafe_index.Tensor",
    "aten::index_put",     "aten::index_put_",    "aten::_index_put_impl_",     "aten::_unsafe_index_put",
    "aten::record_stream",
};

template <class Change>
c10::IValue each_tensor(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value;
}

bool takes_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  return type->kind() == c10::TypeKind::OptionalType &&
      type->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::GeneratorType;
}

c10::IValue on_host(const c10::IValue& value, const c10::Argument& argument, Counterparts& counterparts) {
  if (argument.name() == "pin_memory") {
    return c10::IValue();
  }
  if (value.isDevice() && value.toDevice().is_cuda()) {
    return c10::Device(at::kCPU);
  }
  if (value.isGenerator()) {
    const auto generator = value.toGenerator();
    TORCH_CHECK(
        generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", generator.device(), "'");
    return DeviceGenerator::host_of(generator);
  }
  if (value.isNone() && takes_generator(argument)) {
    return DeviceGenerator::host_of(default_generator());
  }
  return each_tensor(value, [&](const Tensor& tensor) { return counterparts.host(tensor); });
}

void check_devices(const c10::OperatorName& name, c10::ArrayRef<c10::IValue> arguments) {
  bool device = false;
  bool host = false;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      if (tensor.defined()) {
        device |= tensor.is_cuda();
        host |= tensor.device().is_cpu() && tensor.dim() > 0;
      }
      return tensor;
    });
  }
  const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  TORCH_CHECK(
      !(device && host) || TAKE_BOTH_DEVICES.count(full),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", full, ")");
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  check_devices(op.operator_name(), torch::jit::last(*stack, count));

  Counterparts counterparts;
  const auto first = stack->size() - count;
  for (size_t k = 0; k < count; ++k) {
    (*stack)[first + k] = on_host((*stack)[first + k], schema.arguments()[k], counterparts);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  counterparts.take_over_resized();
  for (size_t k = stack->size() - schema.returns().size(); k < stack->size(); ++k) {
    (*stack)[k] = each_tensor((*stack)[k], [&](const Tensor& tensor) { return counterparts.device(tensor); });
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators that make tensors, move numbers between the devices, or would not reach the fallback.

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using MaybeDevice = std::optional<c10::Device>;
using Pin = std::optional<bool>;

Tensor empty(at::IntArrayRef size, Type type, Layout, MaybeDevice, Pin pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return Tensor(at::detail::empty_generic(size, &device_memory, KEYS, c10::dtype_or_default(type), format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Type type, Layout, MaybeDevice, Pin) {
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, c10::dtype_or_default(type)));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::DispatchKeySet(c10::autograd_dispatch_keyset) | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  on_host(self).copy_(on_host(source), non_blocking);
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor written = target;
  return copy_(written, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar read_scalar(const Tensor& tensor) { return on_host(tensor).item(); }

int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

void record_stream(Tensor&, c10::Stream) {}

Tensor& set_view(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(), "Attempted to set the storage of a tensor on device \"cuda:0\" to a storage on ",
              source.device());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_view(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

} // namespace

// A build with CUDA has kernels of its own, which need a driver.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const auto& op : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (op.name.rfind("aten::", 0) == 0) {
      const auto full = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("_fused_sdp_choice", plain_attention);
  library.impl("record_stream", record_stream);
  library.impl("set_.source_Storage_storage_offset", set_view);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  for (const char* name : {"convolution", "convolution_backward", "convolution_overrideable", "_convolution"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

// What the Python module calls.
extern "C" {
int64_t pretend_allocated() { return allocated; }
void pretend_seed(uint64_t seed) { default_generator().set_current_seed(seed); }
int64_t pretend_state_size() { return default_generator().unsafeGetGeneratorImpl()->get_state()->numel(); }
void pretend_get_state(void* into) {
  const auto state = default_generator().unsafeGetGeneratorImpl()->get_state();
  std::memcpy(into, state->data(), state->numel());
}
void pretend_set_state(const void* from) {
  const auto state = default_generator().unsafeGetGeneratorImpl()->get_state();
  std::memcpy(state->mutable_data(), from, state->numel());
  default_generator().unsafeGetGeneratorImpl()->set_state(*state);
}
}
