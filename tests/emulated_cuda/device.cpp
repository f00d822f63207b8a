// A CUDA device that is not there, for the CPU build of torch.
//
// Its memory is the host's. The allocator rounds as CUDA's caching allocator rounds, to 512 bytes, and counts the bytes in use
// and their peak, those in the pool of CUDA graphs apart. Its kernels are the CPU's: every op that is not listed below falls
// back to them, on the same memory.
//
// Torch asks for the hooks once, when it is imported, so this library is loaded before that.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device DEVICE(DeviceType::CUDA, 0);

// -- memory: one heap, counted -----------------------------------------------------------------------------------------

constexpr size_t GRANULARITY = 512;

struct Counter {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t bytes) {
    const int64_t now = live += bytes;
    int64_t before = peak;
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
  }
};

enum Memory { ALL, POOL, OUTSIDE, MEMORIES };
Counter counters[MEMORIES];
thread_local bool uses_pool = false;

// Blocks of the pool that are free, by size. Torch knows memory of the pool by its address, so no other memory gets it.
std::multimap<size_t, void*> free_blocks;
std::mutex free_blocks_mutex;

void* take_block(size_t bytes) {
  const std::lock_guard<std::mutex> lock(free_blocks_mutex);
  const auto found = free_blocks.find(bytes);
  if (found == free_blocks.end()) {
    return std::aligned_alloc(GRANULARITY, bytes);
  }
  void* data = found->second;
  free_blocks.erase(found);
  return data;
}

void give_block(void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(free_blocks_mutex);
  free_blocks.emplace(bytes, data);
}

thread_local c10::StreamId current_stream = 0;

// All allocations and frees in sequence: the number of an allocation, its bytes or FREED, its part of the memory, its stream.
constexpr int64_t FREED = -1;
struct Event {
  int64_t number;
  int64_t bytes;
  int64_t memory;
  int64_t stream;
};
std::vector<Event> events;
std::mutex events_mutex;

int64_t log_allocation(int64_t bytes, Memory memory) {
  const std::lock_guard<std::mutex> lock(events_mutex);
  const auto number = static_cast<int64_t>(events.size());
  events.push_back({number, bytes, memory, current_stream});
  return number;
}

void log_free(int64_t number, Memory memory) {
  const std::lock_guard<std::mutex> lock(events_mutex);
  events.push_back({number, FREED, memory, current_stream});
}

struct Block {
  void* data;
  int64_t bytes;
  Memory memory;
  int64_t number;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  log_free(block->number, block->memory);
  counters[ALL].live -= block->bytes;
  counters[block->memory].live -= block->bytes;
  if (block->memory == POOL) {
    give_block(block->data, block->bytes);
  } else {
    std::free(block->data);
  }
  delete block;
}

struct Heap final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, DEVICE};
    }
    const size_t rounded = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    const Memory memory = uses_pool ? POOL : OUTSIDE;
    void* data = memory == POOL ? take_block(rounded) : std::aligned_alloc(GRANULARITY, rounded);
    const auto size = static_cast<int64_t>(rounded);
    auto* block = new Block{data, size, memory, log_allocation(size, memory)};
    counters[ALL].add(block->bytes);
    counters[memory].add(block->bytes);
    return {block->data, block, &release, DEVICE};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Heap heap;

// -- one device, on whose streams everything has always finished -------------------------------------------------------

std::atomic<c10::StreamId> last_stream{0};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream stream(c10::StreamId number) {
    return Stream(Stream::UNSAFE, DEVICE, number);
  }
  Device exchangeDevice(Device) const override {
    return DEVICE;
  }
  Device getDevice() const override {
    return DEVICE;
  }
  Stream getStream(Device) const noexcept override {
    return stream(current_stream);
  }
  Stream getDefaultStream(Device) const override {
    return stream(0);
  }
  Stream getStreamFromGlobalPool(Device, bool) const override {
    return stream(++last_stream);
  }
  Stream getNewStream(Device, int) const override {
    return stream(++last_stream);
  }
  Stream exchangeStream(Stream next) const noexcept override {
    return stream(std::exchange(current_stream, next.id()));
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// -- tensors -----------------------------------------------------------------------------------------------------------

Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(sizes, &heap, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, &heap, keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (self.sizes() != target.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  const int64_t count = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const size_t needed = (count + tensor->storage_offset()) * self.element_size();
  auto storage = self.storage();
  if (needed > storage.nbytes()) {
    auto grown = heap.allocate(needed);
    std::memcpy(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(needed);
  }
  tensor->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Contiguous) {
    tensor->empty_tensor_restride(*format);
  }
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

void record_stream(Tensor&, Stream) {}

bool equal(const Tensor& left, const Tensor& right) {
  return at::equal(on_cpu(left), on_cpu(right));
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// -- attention: the kernel that the card would take --------------------------------------------------------------------

int64_t (*chooser)(const char*, const int64_t*, double) = nullptr;

// Python decides, by the rules of the card, and returns a number of at::SDPBackend. The numbers are those of
// `card.choose_attention`: batches, heads, lengths, widths, last strides and offsets of query, key and value; whether they
// train; causal; grouped; the dimensions of the mask, its last stride, whether it trains, and its sizes.
int64_t choose_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double>,
    bool grouped) {
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) {
    return static_cast<int64_t>(at::SDPBackend::math);
  }
  std::vector<int64_t> facts;
  const auto add = [&facts](const c10::SymInt& number) { facts.push_back(number.guard_int(__FILE__, __LINE__)); };
  for (const int64_t dimension : {0, 1, 2, 3}) {
    for (const auto& tensor : {query, key, value}) {
      add(tensor.sym_size(dimension));
    }
  }
  for (const auto& tensor : {query, key, value}) {
    add(tensor.sym_stride(-1));
  }
  for (const auto& tensor : {query, key, value}) {
    add(tensor.sym_storage_offset());
  }
  const bool trains = query.requires_grad() || key.requires_grad() || value.requires_grad();
  facts.insert(facts.end(), {trains && at::GradMode::is_enabled(), causal, grouped});
  facts.push_back(mask.has_value() ? mask->dim() : -1);
  if (mask.has_value()) {
    add(mask->sym_stride(-1));
    facts.push_back(mask->requires_grad());
    for (const auto& size : mask->sym_sizes()) {
      add(size);
    }
  }
  return chooser(toString(query.scalar_type()), facts.data(), dropout);
}

} // namespace

namespace at {

struct EmulatedHooks : CUDAHooksInterface {
  explicit EmulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  int getNumGPUs() const override {
    return 1;
  }
  Allocator* getCUDADeviceAllocator() const override {
    return &heap;
  }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedHooks)

} // namespace at

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("resize_", resize_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("equal", equal);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(at::native::view));
  library.impl(
      "_reshape_alias",
      static_cast<Tensor (*)(const Tensor&, at::IntArrayRef, at::IntArrayRef)>(at::native::_reshape_alias));
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

extern "C" {

void emulated_start(decltype(chooser) choose) {
  chooser = choose;
  c10::impl::registerDeviceGuard(DeviceType::CUDA, new Guard());
  c10::SetAllocator(DeviceType::CUDA, &heap, 100);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}

int64_t emulated_live_bytes(int memory) {
  return counters[memory].live;
}

int64_t emulated_peak_bytes(int memory) {
  return counters[memory].peak;
}

void emulated_reset_peak() {
  for (auto& counter : counters) {
    counter.peak = counter.live.load();
  }
}

// Returns the number of events until now.
int64_t emulated_events() {
  const std::lock_guard<std::mutex> lock(events_mutex);
  return static_cast<int64_t>(events.size());
}

// Copies the events from `begin` to `end`, of four numbers each.
void emulated_copy_events(int64_t begin, int64_t end, int64_t* target) {
  const std::lock_guard<std::mutex> lock(events_mutex);
  std::memcpy(target, events.data() + begin, (end - begin) * sizeof(Event));
}

// Makes this thread allocate in the pool of CUDA graphs, or outside.
void emulated_use_pool(bool wanted) {
  uses_pool = wanted;
}

void emulated_free(c10::StorageImpl* storage) {
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, DEVICE));
}
}
