// A simulated accelerator for machines without one. Its memory is CPU memory, and its operators call the CPU kernels.
// For torch it is a separate device: its tensors have their own storage, cannot be combined with CPU tensors, and
// cannot be sent by gloo.
//
// How to add a device to torch: https://docs.pytorch.org/docs/2.13/accelerator/index.html

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
const c10::Device device(kind, 0);
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

// -- memory

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? malloc(bytes) : nullptr;
    return {at, at, &free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

// -- the only stream, which runs operations at once; events are timestamps

using Moment = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto took = *static_cast<Moment*>(end) - *static_cast<Moment*>(begin);
    return std::chrono::duration<double, std::milli>(took).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

Hooks hooks;
const bool known = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// -- allocation and views

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor view_of(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  auto storage = c10::Storage(self.storage());
  auto out = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), self.key_set(), self.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return out;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  auto size = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(sizes), self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), size);
  TORCH_CHECK(stride, "view size is not compatible with input tensor's size and stride");
  return view_of(self, size, *stride, std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(self, size, stride, std::nullopt);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto room = memory.allocate(bytes);
    if (storage.nbytes()) memcpy(room.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(room));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return set_(self, std::move(source), 0, {count}, {1});
}

// -- copies between devices

// A CPU view of the same memory, valid while the tensor exists.
at::Tensor here(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto bytes = c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::kCPU));
  auto nbytes = tensor.storage().nbytes();
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(bytes), nullptr, false);
  const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  auto out = at::detail::make_tensor<at::TensorImpl>(std::move(storage), cpu, tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return out;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  here(to).copy_(here(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());  // makes it contiguous
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) { return at::_local_scalar_dense(here(tensor)); }

// -- hooks of a new device

std::optional<at::Tensor> here(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? std::make_optional(here(*tensor)) : std::nullopt;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  return at::convolution_symint(here(input), here(weight), here(bias), stride, padding, dilation, transposed,
                                output_padding, groups)
      .to(device);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  const c10::SymInt channels[] = {grad.sym_size(1)};
  auto [a, b, c] = at::convolution_backward_symint(here(grad), here(input), here(weight), channels, stride, padding,
                                                   dilation, transposed, output_padding, groups, mask);
  auto there = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(device) : tensor; };
  return {there(a), there(b), there(c)};
}

// It changes the running statistics without declaring so in its schema, so the fallback would lose the change.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto [a, b, c] = at::native_batch_norm(here(input), here(weight), here(bias), here(mean), here(variance), training,
                                         momentum, eps);
  return {a.to(device), b.to(device), c.to(device)};
}

// -- fallback for all other operators

void check(const at::Tensor& tensor, const c10::OperatorHandle& op) {
  TORCH_CHECK(!tensor.defined() || !tensor.device().is_cpu() || tensor.dim() == 0,
              "Expected all tensors to be on the same device, but found at least two devices, standin:0 and cpu! (in ",
              op.schema().name(), ")");
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) check(value.toTensor(), op);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) check(tensor, op);
  }
  at::native::cpu_fallback(op, stack, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &view_of);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("native_batch_norm", &native_batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGHER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(HIGHER)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
