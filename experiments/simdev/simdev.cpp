// A simulated accelerator for PyTorch (PrivateUse1), asynchronous in earnest. Written from torch's installed headers.
// Each stream is a thread that works off a queue, with random delays. Device memory has two addresses: the one that
// tensors have is PROT_NONE, so that host code that touches it crashes; stream threads use a shadow of the same pages.
// Freed memory is poisoned in the order of the stream that it belongs to, and reused by that stream at once.
// A dry accelerator (sim_dry) runs none of this and moves no byte: its streams pass as much time as those of a GPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/thread_pool.h>
#include <torch/library.h>

#include "../../csrc/arrivals.h"
#include "../../csrc/order.h"
#include "../../csrc/runtime.h"
#include "timed.h"

#include <fcntl.h>
#include <pthread.h>
#include <linux/falloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <shared_mutex>
#include <thread>

namespace {
using Clock = std::chrono::steady_clock;
using at::Tensor;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct Config {
  double probability = 0.3;
  int most_us = 300;
  unsigned seed = 0;
} config;
std::atomic<bool> forbid_sync{false};
std::atomic<long> syncs{0};

// ---- what stream threads are doing, for the report of a crash
thread_local const char* doing = nullptr;
thread_local int doing_stream = -1;
struct sigaction previous_segv, previous_bus;

void on_fault(int sig, siginfo_t* info, void*);

// ---- a dry accelerator: what a GPU does is time that passes, on the clock of the wall
struct Dry {
  timed::Simulation simulation;
  double copy_s, memcpy_s, event_s, launch_s, stats_s;  // that the host takes for a call
  double stretch;           // by which everything takes longer on the host, for each thread that updates there
  double device_bandwidth;  // of its memory, in bytes per second, for operations that nobody has timed
  std::atomic<double> slower;  // how many times as long as here whatever runs between calls takes on that host
  Clock::time_point start = Clock::now();
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_mutex freeing;  // by who gives memory back, for which other threads' calls wait
  std::atomic<int> updating{0};  // threads
  std::vector<std::pair<double, double>> updates;  // on the CPU: from when to when
  double looked = timed::NEVER;  // when the next work ends, as who waits has found it last
  double issued = timed::NEVER;  // when a copy, a launch or an update on the CPU was first issued since it was asked

  double stretched() const { return 1 + stretch * updating; }
  double now() const { return std::chrono::duration<double>(Clock::now() - start).count(); }
  void notice() { issued = std::min(issued, now()); }
  // Of the simulation, at this time.
  template <class F>
  auto at_once(F ask) {
    std::lock_guard<std::mutex> held(mutex);
    simulation.advance(now());
    if constexpr (std::is_void_v<decltype(ask(simulation))>) {
      ask(simulation);
      simulation.advance(simulation.time);
      if (simulation.next() < looked) changed.notify_all();  // earlier than those expect who wait
    } else {
      return ask(simulation);
    }
  }
  // early: seconds before its end from which this thread does not sleep, as one that works.
  void wait(const timed::MomentPtr& moment, double early = 0) {
    std::unique_lock<std::mutex> held(mutex);
    for (;;) {
      simulation.advance(now());
      if (moment->done) return;
      looked = simulation.next();
      if (looked == timed::NEVER) {
        changed.wait(held);
      } else if (looked - early > now()) {
        changed.wait_until(held, start + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(looked - early)));
      } else {
        held.unlock(), std::this_thread::yield(), held.lock();
      }
    }
  }
  bool passed(const timed::MomentPtr& moment) {
    return at_once([&](auto&) { return moment->done; });
  }
};
Dry* dry = nullptr;

constexpr int COMPARISONS = 256;    // of Python's speed, whose mean counts
constexpr double AWAKE_S = 100e-6;  // before time is up, from which a thread does not sleep
constexpr double OFTEN_S = 15e-6;   // between two settlements, for looking at the CPU time is a call of the system
// What this thread has run, such as Python, takes longer on the machine's host; so do a runtime's calls. It pays later.
struct Account {
  double settled = -1;  // at which time
  double used = 0;      // CPU time of this thread then
  double aside = 0;     // seconds since then that are none of the machine's time
  double owed = 0;      // seconds of calls since then

  // Where there are two cores, forward and backward have one to themselves: the CPU time of threads that take turns on
  // one is several times as long, and the machine has a core for each.
  Account() {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    bool first = gettid() == getpid() || strstr(name, "autograd");
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (first)
      CPU_SET(0, &cores);
    else
      for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) CPU_SET(i, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
  }
  static double now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
  }
  // From here on, whatever ran before is none of the machine's time.
  void forget() { settled = dry->now(), used = now(), aside = 0; }
  void settle() {
    if (settled >= 0) {
      double ran = std::max(0.0, now() - used - aside);
      owed += ran * (dry->slower - 1 / dry->stretched());
    }
    spend(std::exchange(owed, 0));
  }
  void spend(double seconds) {
    for (double last = dry->now(), now; seconds > 0; last = now) {
      std::this_thread::yield();  // this machine has few cores; who sleeps leaves the caches to other programs, too
      now = dry->now();
      seconds -= (now - last) / dry->stretched();
    }
    forget();
  }
};
thread_local Account account;

// A call of a runtime, which takes the host some time.
struct Call {
  double cost, begin = 0;
  explicit Call(double Dry::*cost) : Call(dry ? dry->*cost : 0) {}
  explicit Call(double cost) : cost(cost) {
    if (!dry) return;
    if (dry->now() - account.settled > OFTEN_S) account.settle();
    begin = dry->now();
    std::shared_lock<std::shared_mutex> held(dry->freeing);
  }
  ~Call() {
    if (!dry) return;
    double took = dry->now() - begin;
    account.aside += took;
    account.owed += std::max(0.0, cost - took / dry->stretched());
  }
};

// ---- moments in a stream's work
struct Moment {
  timed::MomentPtr timed;  // of a dry accelerator
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point at;
  void finish() {
    std::lock_guard<std::mutex> held(mutex);
    done = true;
    at = Clock::now();
    changed.notify_all();
  }
  void wait() {
    if (timed) return account.settle(), dry->wait(timed), account.forget();
    std::unique_lock<std::mutex> held(mutex);
    changed.wait(held, [&] { return done; });
  }
  bool query() {
    if (timed) return dry->passed(timed);
    std::lock_guard<std::mutex> held(mutex);
    return done;
  }
  double seconds() const {  // since some time, once it is done
    return timed ? timed->at : std::chrono::duration<double>(at.time_since_epoch()).count();
  }
};
using MomentPtr = std::shared_ptr<Moment>;

struct Work {
  std::string name;
  std::function<void()> run;
  bool may_delay;
};

struct Queue {
  int id;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> works;
  bool busy = false;
  std::mt19937 random;
  explicit Queue(int id) : id(id), random(config.seed * 1000 + id) {
    if (!dry) std::thread([this] { loop(); }).detach();
  }
  void put(std::string name, std::function<void()> run, bool may_delay = true) {
    TORCH_INTERNAL_ASSERT(!dry);
    std::lock_guard<std::mutex> held(mutex);
    works.push_back({std::move(name), std::move(run), may_delay});
    changed.notify_all();
  }
  MomentPtr mark() {
    auto moment = std::make_shared<Moment>();
    if (dry) {
      dry->at_once([&](auto& simulation) { moment->timed = simulation.mark(id); });
      return moment;
    }
    put("event", [moment] { moment->finish(); });
    return moment;
  }
  void wait(MomentPtr moment) {
    if (dry) return dry->at_once([&](auto& simulation) { simulation.wait(id, moment->timed); });
    put("wait", [moment] { moment->wait(); });
  }
  void copy(timed::Link link, double bytes) {
    dry->at_once([&](auto& simulation) { dry->notice(), simulation.copy(id, link, bytes); });
  }
  void compute(double seconds) {
    dry->at_once([&](auto& simulation) { simulation.compute(id, seconds); });
  }
  bool idle() {
    if (dry) return dry->at_once([&](auto& simulation) { return simulation.idle(id); });
    std::lock_guard<std::mutex> held(mutex);
    return works.empty() && !busy;
  }
  void loop() {
    at::AutoDispatchBelowADInplaceOrView guard;
    doing_stream = id;
    for (;;) {
      Work work;
      {
        std::unique_lock<std::mutex> held(mutex);
        busy = false;
        changed.notify_all();
        changed.wait(held, [&] { return !works.empty(); });
        work = std::move(works.front());
        works.pop_front();
        busy = true;
      }
      if (work.may_delay && config.most_us > 0 &&
          std::uniform_real_distribution<>(0, 1)(random) < config.probability) {
        int us = std::uniform_int_distribution<>(0, config.most_us)(random);
        if (random() % 16 == 0) us *= 8;
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      }
      doing = work.name.c_str();
      try {
        work.run();
      } catch (const std::exception& error) {
        fprintf(stderr, "simdev: stream %d: %s: %s\n", id, work.name.c_str(), error.what());
        abort();
      }
      doing = nullptr;
    }
  }
};

constexpr int STREAMS = 64;
std::mutex streams_mutex;
auto& queues = *new std::vector<Queue*>;  // for good, as threads use them until the process has ended
int next_stream = 1;

Queue& queue(int id) {
  std::lock_guard<std::mutex> held(streams_mutex);
  while ((int)queues.size() <= id) queues.push_back(new Queue((int)queues.size()));
  return *queues[id];
}
thread_local int current_stream = 0;

void sync_stream(int id) {
  ++syncs;
  queue(id).mark()->wait();
}
void sync_all() {
  size_t n;
  {
    std::lock_guard<std::mutex> held(streams_mutex);
    n = queues.size();
  }
  std::vector<MomentPtr> moments;
  for (size_t i = 0; i < n; ++i) moments.push_back(queue(i).mark());
  for (auto& each : moments) each->wait();
}
void refuse_sync(const char* what) {
  TORCH_CHECK(!forbid_sync, "simdev: called a synchronizing operation: ", what);
}

// ---- memory
constexpr size_t SPACE = size_t(1) << 40;
char *protected_base, *shadow_base;
int memory_file;

struct Block {
  size_t offset, size;
  int stream;
  std::set<int> used_by;
  size_t asked;
};

struct SimAllocator final : c10::DeviceAllocator {
  std::mutex mutex;
  size_t capacity = size_t(4) << 30, others = 0, reserved = 0, next = 0;
  long fail_in = -1;
  double fail_share = 0;
  std::mt19937 random{0};
  std::map<int, std::multimap<size_t, Block*>> unused;
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> pending;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::function<void(const char*)> trace;

  static void poison_on(Block* block) {
    if (dry) return;
    size_t offset = block->offset, size = block->size;
    queue(block->stream).put("poison", [=] { memset(shadow_base + offset, 0xFF, size); }, false);
  }
  void process() {  // mutex is held
    for (size_t i = 0; i < pending.size();) {
      auto& [block, moments] = pending[i];
      bool done = true;
      for (auto& each : moments) done = done && each->query();
      if (!done) {
        ++i;
        continue;
      }
      poison_on(block);
      stats.active_bytes[0].decrease(block->size);
      unused[block->stream].emplace(block->size, block);
      pending.erase(pending.begin() + i);
    }
  }
  // All that is not used goes back, as by cudaFree, which waits for the device. The mutex is held, but not meanwhile:
  // work that the device does may need Python's lock, whose owner may be waiting for the mutex.
  void flush(std::unique_lock<std::mutex>& held) {
    held.unlock();
    sync_all();
    held.lock();
    process();
    auto given_back = std::move(unused);
    unused.clear();
    held.unlock();
    sync_all();
    held.lock();
    for (auto& [stream, blocks] : given_back)
      for (auto& [size, block] : blocks) {
        mprotect(shadow_base + block->offset, block->size, PROT_NONE);
        fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block->offset, block->size);
        reserved -= block->size;
        stats.reserved_bytes[0].decrease(block->size);
        stats.segment[0].decrease(1);
        delete block;
      }
  }
  Block* find(size_t size) {
    auto& mine = unused[current_stream];
    auto found = mine.lower_bound(size);
    if (found == mine.end() || found->first > 2 * size) return nullptr;
    Block* block = found->second;
    mine.erase(found);
    return block;
  }
  Block* make(size_t size) {
    if (reserved + others + size > capacity) return nullptr;
    auto* block = new Block{next, size, current_stream, {}, 0};
    next += (size + 4095) / 4096 * 4096 + 4096;  // a page between blocks that nobody may touch
    TORCH_CHECK(next < SPACE, "simdev: address space is used up");
    if (!dry) {
      mprotect(shadow_base + block->offset, (size + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE);
      memset(shadow_base + block->offset, 0xFF, size);
    }
    reserved += size;
    stats.reserved_bytes[0].increase(size);
    stats.segment[0].increase(1);
    return block;
  }
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(KIND, 0);
    if (!n) return {nullptr, nullptr, [](void*) {}, device};
    size_t unit = n <= (1 << 20) ? 4096 : 65536, size = (n + unit - 1) / unit * unit;
    std::unique_lock<std::mutex> held(mutex);
    bool fail = fail_in >= 0 && fail_in-- == 0;
    fail = fail || (fail_share > 0 && std::uniform_real_distribution<>(0, 1)(random) < fail_share);
    process();
    Block* block = fail ? nullptr : find(size);
    if (!block && !fail) block = make(size);
    if (!block && !fail) {
      flush(held);
      stats.num_alloc_retries++;
      block = make(size);
    }
    if (!block) {
      stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simdev out of memory. Tried to allocate ", n, " bytes; ", reserved,
                       " reserved of ", capacity, fail ? " (on purpose)" : "");
    }
    block->asked = n;
    stats.allocated_bytes[0].increase(block->size);
    stats.active_bytes[0].increase(block->size);
    stats.requested_bytes[0].increase(n);
    stats.allocation[0].increase(1);
    return {protected_base + block->offset, block, &release, device};
  }
  static void release(void* context);
  void free(Block* block) {
    std::lock_guard<std::mutex> held(mutex);
    stats.allocated_bytes[0].decrease(block->size);
    stats.requested_bytes[0].decrease(block->asked);
    stats.allocation[0].decrease(1);
    block->used_by.erase(block->stream);
    if (block->used_by.empty()) {
      poison_on(block);
      stats.active_bytes[0].decrease(block->size);
      unused[block->stream].emplace(block->size, block);
      return;
    }
    std::vector<MomentPtr> moments;
    for (int id : block->used_by) moments.push_back(queue(id).mark());
    block->used_by.clear();
    pending.emplace_back(block, std::move(moments));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    if (dry) return queue(current_stream).compute(2 * n / dry->device_bandwidth);
    auto delta = shadow_base - protected_base;
    queue(current_stream).put("copy_data", [=] { memcpy((char*)to + delta, (const char*)from + delta, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::unique_lock<std::mutex> held(mutex);
    flush(held);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer.get_context()) return;
    std::lock_guard<std::mutex> held(mutex);
    static_cast<Block*>(pointer.get_context())->used_by.insert((int)stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Call call(&Dry::stats_s);
    std::lock_guard<std::mutex> held(mutex);
    process();
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> held(mutex);
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> held(mutex);
    size_t taken = std::min(capacity, reserved + others);
    return {capacity - taken, capacity};
  }
};
SimAllocator& allocator() {
  static auto* it = new SimAllocator;
  return *it;
}
void SimAllocator::release(void* context) {
  if (context) allocator().free(static_cast<Block*>(context));
}

// ---- host memory that the device may use by itself
std::mutex pinned_mutex;
auto& pinned = *new std::map<char*, size_t>;

bool is_pinned(const void* address, size_t n = 0) {
  std::lock_guard<std::mutex> held(pinned_mutex);
  auto next = pinned.upper_bound((char*)address);
  if (next == pinned.begin()) return false;
  --next;
  if ((char*)address >= next->first + next->second) return false;
  TORCH_CHECK((char*)address + n <= next->first + next->second,
              "simdev: invalid argument: a copy crosses the end of a pinned region");
  return true;
}
void check_pinned(const void* address) {
  TORCH_CHECK(is_pinned(address), "host memory was unregistered under a copy that was queued");
}
struct HostBlock {
  void* address;
  size_t size;
};
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    size_t size = std::max<size_t>(4096, (n + 4095) / 4096 * 4096);
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::lock_guard<std::mutex> held(pinned_mutex);
    pinned[(char*)address] = size;
    return {address, new HostBlock{address, size}, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* context) {
    // torch's own keeps it until the streams that used it are done. On a thread, for the caller may hold Python's lock.
    std::thread([block = static_cast<HostBlock*>(context)] {
      sync_all();
      std::lock_guard<std::mutex> held(pinned_mutex);
      pinned.erase((char*)block->address);
      munmap(block->address, block->size);
      delete block;
    }).detach();
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_allocator;

// ---- streams, events, devices
struct SimEvent {
  MomentPtr moment;
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, 0), id); }
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "simdev: there is one device"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    std::lock_guard<std::mutex> held(streams_mutex);
    int id = next_stream++;
    if (next_stream > STREAMS) next_stream = 1;
    return stream_of(id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(current_stream);
    current_stream = (int)stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<SimEvent*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Call call(&Dry::event_s);
    if (!*event) *event = new SimEvent;
    static_cast<SimEvent*>(*event)->moment = queue((int)stream.id()).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || !static_cast<SimEvent*>(event)->moment) return;
    Call call(&Dry::event_s);
    queue((int)stream.id()).wait(static_cast<SimEvent*>(event)->moment);
  }
  bool queryEvent(void* event) const override {
    Call call(0.0);
    return !event || !static_cast<SimEvent*>(event)->moment || static_cast<SimEvent*>(event)->moment->query();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& stream) const override { return queue((int)stream.id()).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { sync_stream((int)stream.id()); }
  void synchronizeEvent(void* event) const override {
    if (event && static_cast<SimEvent*>(event)->moment) static_cast<SimEvent*>(event)->moment->wait();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { sync_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto &a = static_cast<SimEvent*>(first)->moment, &b = static_cast<SimEvent*>(second)->moment;
    TORCH_CHECK(a && b && a->query() && b->query(), "simdev: both events must have ended");
    return 1e3 * (b->seconds() - a->seconds());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const Guard& guard() {
  static const Guard found;
  return found;
}

// ---- tensors
char* shadow(const Tensor& t) { return (char*)t.const_data_ptr() + (shadow_base - protected_base); }
bool on_device(const Tensor& t) { return t.defined() && t.device().type() == KIND; }

Tensor mirror(const Tensor& t) {  // a CPU tensor of the same memory, which does not hold it
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  TORCH_CHECK(t.const_data_ptr(), "simdev: a tensor without memory is used");
  return at::from_blob(shadow(t), t.sizes(), t.strides(), options);
}
constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(), KEYS, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(), KEYS, c10::dtype_or_default(dtype));
}
Tensor strided_view(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return result;
}
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}
Tensor view(const Tensor& self, at::IntArrayRef size) {
  auto known = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), known);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return strided_view(self, known, *stride, self.storage_offset());
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  auto whole = at::empty_strided(self.sizes(), self.strides(), at::TensorOptions().device(at::kMeta));
  auto shape = whole.unfold(dim, size, step);
  return strided_view(self, shape.sizes(), shape.strides(), self.storage_offset());
}
void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  c10::DataPtr fresh = allocator().allocate(nbytes);
  size_t n = std::min(nbytes, storage->nbytes());
  if (n && storage->data() && dry) {
    queue(current_stream).compute(2 * n / dry->device_bandwidth);
  } else if (n && storage->data()) {
    auto delta = shadow_base - protected_base;
    char *to = (char*)fresh.get() + delta, *from = (char*)storage->data() + delta;
    queue(current_stream).put("resize", [=] { memcpy(to, from, n); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && needed > impl->unsafe_storage().nbytes())
    resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  c10::DimVector strides(stride.begin(), stride.end());
  if (strides.size() != size.size()) strides = c10::contiguous_strides(size);
  impl->set_sizes_and_strides(size, strides, offset);
  size_t needed = at::detail::computeStorageNbytes(size, strides, impl->itemsize(), offset);
  if (impl->numel() && needed > source.nbytes()) resize_storage(source.unsafeGetStorageImpl(), needed);
  return self;
}
Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return set_storage(self, source, 0, {n}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return set_storage(self, none, 0, {0}, {});
}

void copy_dry(const Tensor& source, const Tensor& to, bool non_blocking) {
  Call call(&Dry::copy_s);
  auto& mine = queue(current_stream);
  if (on_device(source) && on_device(to)) return mine.compute((source.nbytes() + to.nbytes()) / dry->device_bandwidth);
  const Tensor& host = on_device(to) ? source : to;
  bool plain = source.dtype() == to.dtype() && source.is_contiguous() && to.is_contiguous();
  plain = plain && is_pinned(host.const_data_ptr(), host.nbytes());
  mine.copy(on_device(to) ? timed::H2D : timed::D2H, host.nbytes());
  bool answer = !on_device(to) && host.nbytes() <= 16;  // a number that the host will read: 0
  if (answer) memset(host.mutable_data_ptr(), 0, host.nbytes());
  if (!non_blocking || !(plain || answer || on_device(to))) refuse_sync("copy"), sync_stream(current_stream);
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (dry) return copy_dry(source, to, non_blocking), to;
  auto& mine = queue(current_stream);
  if (on_device(source) && on_device(to)) {
    auto a = mirror(to), b = mirror(source);
    mine.put("copy on device", [=]() mutable { a.copy_(b); });
    return to;
  }
  bool plain = source.dtype() == to.dtype() && source.is_contiguous() && to.is_contiguous();
  if (on_device(to)) {
    if (plain && is_pinned(source.const_data_ptr(), source.nbytes())) {
      const void* host = source.const_data_ptr();
      char* device = shadow(to);
      size_t n = to.nbytes();
      mine.put("copy to device", [=] { check_pinned(host), memcpy(device, host, n); });
      if (!non_blocking) refuse_sync("copy from the host"), sync_stream(current_stream);
      return to;
    }
    if (!non_blocking) refuse_sync("copy from the host");
    auto a = mirror(to), staged = source.clone();
    mine.put("copy to device (pageable)", [=]() mutable { a.copy_(staged); });
    return to;
  }
  if (plain && non_blocking && is_pinned(to.const_data_ptr(), to.nbytes())) {
    void* host = to.mutable_data_ptr();
    char* device = shadow(source);
    size_t n = to.nbytes();
    mine.put("copy to host", [=] { check_pinned(host), memcpy(host, device, n); });
    return to;
  }
  refuse_sync("copy to the host");
  auto a = mirror(source);
  auto b = to;
  mine.put("copy to host (blocking)", [=]() mutable { b.copy_(a); });
  sync_stream(current_stream);
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  refuse_sync("item()");
  sync_stream(current_stream);
  if (dry) return at::zeros({}, at::TensorOptions().dtype(self.dtype())).item();
  return mirror(self).item();
}
// As on a GPU `p.data` may become memory of the other side.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}
void record_stream(Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

// ---- all other operations
template <class F>
c10::IValue mapped(const c10::IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (Tensor each : value.toTensorList()) out.push_back(change(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (std::optional<Tensor> each : value.toOptionalTensorList())
      out.push_back(each.has_value() ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return out;
  }
  return value;
}
Tensor to_cpu(const Tensor& t) {
  if (!t.defined()) return t;
  return on_device(t) ? mirror(t) : t.clone();  // by value, as a kernel's arguments
}
Tensor to_meta(const Tensor& t) {
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
}
std::set<std::string> slow;  // operations that had to wait for the device, for the report
std::mutex slow_mutex;
constexpr double LEAST_S = 2e-6;  // of an operation of a dry accelerator

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  torch::jit::Stack cpu, meta;
  double bytes = 0;
  Call call(&Dry::launch_s);
  bool random = schema.name().find("dropout") != std::string::npos;
  for (size_t i = 0; i < count; ++i) {
    const auto& value = arguments[i];
    bool device = value.isDevice();
    if (value.isTensor() && value.toTensor().defined()) bytes += value.toTensor().nbytes();
    for (auto& each : value.isTensorList() ? value.toTensorVector() : std::vector<Tensor>()) bytes += each.nbytes();
    if (schema.arguments()[i].name() == "generator") random = true;
    cpu.push_back(device                ? c10::IValue(c10::Device(at::kCPU))
                  : value.isGenerator() ? c10::IValue()
                  : dry                 ? value
                                        : mapped(value, to_cpu));
    meta.push_back(device ? c10::IValue(c10::Device(at::kMeta)) : value.isGenerator() ? c10::IValue() : value);
  }
  // What is returned: an argument that is written to, or something new.
  std::vector<c10::IValue> results;
  bool fresh = false;
  for (const auto& result : schema.returns()) {
    const auto* info = result.alias_info();
    c10::IValue found;
    if (info) {
      TORCH_CHECK(info->isWrite(), "simdev: ", schema.name(), " returns a view, which nobody has written here");
      for (size_t i = 0; i < count; ++i) {
        const auto* theirs = schema.arguments()[i].alias_info();
        if (theirs && *theirs == *info) found = arguments[i];
      }
    } else {
      fresh = true;
    }
    results.push_back(found);
  }
  torch::jit::drop(*stack, count);
  bool at_once = random && !dry;
  // What is to be written to may be without elements yet: give it its size.
  std::vector<size_t> to_size;
  for (size_t i = 0; i < count; ++i)
    if (schema.arguments()[i].kwarg_only() && schema.arguments()[i].alias_info() && arguments[i].isTensor() &&
        on_device(arguments[i].toTensor()) && !arguments[i].toTensor().numel())
      to_size.push_back(i);
  if (!to_size.empty() && !random) {
    torch::jit::Stack shapes;
    for (auto& value : meta) shapes.push_back(mapped(value, to_meta));
    std::vector<Tensor> outs;
    for (size_t i : to_size) outs.push_back(shapes[i].toTensor());
    bool known = true;
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(&shapes);
    } catch (const std::exception&) {
      known = false;
    }
    TORCH_CHECK(known || !dry, "simdev: a dry accelerator does not know the sizes of what ", schema.name(), " returns");
    if (!known) {  // the host runs it, once to learn the sizes
      sync_stream(current_stream);
      at::AutoDispatchBelowADInplaceOrView guard;
      torch::jit::Stack trial = cpu;
      for (size_t k = 0; k < to_size.size(); ++k)
        outs[k] = at::empty({0}, at::TensorOptions().dtype(arguments[to_size[k]].toTensor().dtype())),
        trial[to_size[k]] = outs[k];
      op.callBoxed(&trial);
    }
    for (size_t k = 0; k < to_size.size(); ++k) {
      auto t = arguments[to_size[k]].toTensor();
      resize_(t, outs[k].sizes(), {});
      if (outs[k].numel()) t.unsafeGetTensorImpl()->set_sizes_and_strides(outs[k].sizes(), outs[k].strides());
      if (!dry) cpu[to_size[k]] = mirror(t);
    }
  }
  if (fresh && !at_once) {
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      for (auto& value : meta) value = mapped(value, to_meta);
      op.callBoxed(&meta);
      TORCH_CHECK(meta.size() == results.size());
      for (size_t i = 0; i < results.size(); ++i) {
        if (schema.returns()[i].alias_info()) continue;
        TORCH_CHECK(meta[i].isTensor() || meta[i].isTensorList());
        results[i] = mapped(meta[i], [](const Tensor& t) {
          return t.defined() ? empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {}) : t;
        });
      }
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception&) {
      at_once = true;
    }
  }
  if (dry) {
    TORCH_CHECK(!at_once, "simdev: a dry accelerator does not know what ", schema.name(), " returns");
    queue(current_stream).compute(LEAST_S + bytes / dry->device_bandwidth);
  } else if (at_once) {
    {
      std::lock_guard<std::mutex> held(slow_mutex);
      slow.insert(schema.name() + "." + schema.overload_name());
    }
    sync_stream(current_stream);
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(&cpu);
    for (size_t i = 0; i < results.size(); ++i) {
      if (schema.returns()[i].alias_info()) continue;
      results[i] = mapped(cpu[i], [](const Tensor& t) {
        if (!t.defined()) return t;
        auto made = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {});
        copy_from(t, made, true);
        return made;
      });
    }
  } else {
    std::vector<c10::IValue> outs;
    for (size_t i = 0; i < results.size(); ++i)
      outs.push_back(schema.returns()[i].alias_info() ? c10::IValue() : mapped(results[i], [](const Tensor& t) {
        return t.defined() ? mirror(t) : t;
      }));
    auto* handle = new c10::OperatorHandle(op);
    queue(current_stream).put(schema.name() + "." + schema.overload_name(), [handle, cpu, outs]() mutable {
      handle->callBoxed(&cpu);
      for (size_t i = 0; i < outs.size(); ++i) {
        if (outs[i].isTensor() && outs[i].toTensor().defined()) outs[i].toTensor().copy_(cpu[i].toTensor());
        if (outs[i].isTensorList()) {
          auto to = outs[i].toTensorList(), from = cpu[i].toTensorList();
          for (size_t k = 0; k < to.size(); ++k) Tensor(to[k]).copy_(Tensor(from[k]));
        }
      }
      delete handle;
    });
  }
  for (auto& each : results) stack->push_back(std::move(each));
}

// Copies between host and device, one by one as torch does on a GPU; else one kernel for all.
void foreach_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto to = torch::jit::peek(*stack, 0, 3).toTensorVector(), from = torch::jit::peek(*stack, 1, 3).toTensorVector();
  bool across = false;
  for (size_t i = 0; i < to.size(); ++i) across = across || !on_device(to[i]) || !on_device(from[i]);
  if (!across) return fallback(op, keys, stack);
  bool non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  torch::jit::drop(*stack, 3);
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

// ---- hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

void on_fault(int sig, siginfo_t* info, void*) {
  auto* at = (char*)info->si_addr;
  const char* where = at >= protected_base && at < protected_base + SPACE ? "device memory, from the host"
                      : at >= shadow_base && at < shadow_base + SPACE     ? "device memory that was given back"
                                                                           : "host memory";
  char text[300];
  int n = snprintf(text, sizeof text, "simdev: FAULT at %p (%s) in %s%d: %s\n", (void*)at, where,
                   doing_stream < 0 ? "host thread " : "stream ", doing_stream, doing ? doing : "-");
  if (write(2, text, n) < 0) _exit(139);
  sigaction(sig, sig == SIGSEGV ? &previous_segv : &previous_bus, nullptr);
}

struct Start {
  Start() {
    if (auto* text = getenv("SIMDEV_DELAY_US")) config.most_us = atoi(text);
    if (auto* text = getenv("SIMDEV_DELAY_P")) config.probability = atof(text);
    if (auto* text = getenv("SIMDEV_SEED")) config.seed = atoi(text);
    memory_file = memfd_create("simdev", 0);
    if (ftruncate(memory_file, SPACE)) perror("ftruncate"), abort();
    protected_base = (char*)mmap(nullptr, SPACE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memory_file, 0);
    shadow_base = (char*)mmap(nullptr, SPACE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memory_file, 0);
    if (protected_base == MAP_FAILED || shadow_base == MAP_FAILED) perror("mmap"), abort();
    if (auto* text = getenv("SIMDEV_CAPACITY")) allocator().capacity = strtoull(text, nullptr, 10);
    c10::SetAllocator(KIND, &allocator(), 1);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} start;
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &strided_view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &view);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  m.impl("record_stream", &record_stream);
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&foreach_copy>());
}

extern "C" {
int orHostRegister(void* address, size_t n) {
  std::lock_guard<std::mutex> held(pinned_mutex);
  pinned[(char*)address] = n;
  return 0;
}
int orHostUnregister(void* address) {
  std::lock_guard<std::mutex> held(pinned_mutex);
  return pinned.erase((char*)address) ? 0 : 1;
}
void sim_faults() {
  at::globalContext().lazyInitDevice(KIND);  // before that no host memory counts as pinned
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}
// From now on, which must be before the first stream is used. figures, count: of timed::Simulation. costs: of Dry, from
// copy_s on.
void sim_dry(const double* figures, int count, const double* costs) {
  dry = new Dry{{figures, count}, costs[0], costs[1], costs[2], costs[3], costs[4], costs[5], costs[6], costs[7]};
}
// Keep the host for what this thread has run since it last called. Or say that this has been paid for.
void sim_pay() { account.settle(); }
void sim_paid() { account.forget(); }
// Let it take so many times as long as here, by another comparison.
void sim_compare(double slower) { dry->slower = dry->slower + (slower - dry->slower) / COMPARISONS; }
// Keep the host, or the device's current stream.
void sim_spend(double seconds) { account.spend(seconds); }
void sim_busy(double seconds) { queue(current_stream).compute(seconds); }
// Queue the kernel of an update.
void sim_update(double seconds) { dry->notice(), queue(current_stream).compute(seconds); }
// Update on the CPU, as timed::Simulation::update has it, until it has ended.
void sim_host_update(double parameters, double rate, double traffic, int threads) {
  sim_pay();
  dry->updating += threads;
  double begin = dry->now();
  timed::MomentPtr ended;
  dry->at_once([&](auto& simulation) { dry->notice(), ended = simulation.update(parameters, rate, traffic, threads); });
  dry->wait(ended, AWAKE_S);
  dry->updating -= threads;
  dry->at_once([&](auto&) { dry->updates.emplace_back(begin, ended->at); });
  sim_paid();
}
// The order of updates on the CPU, as the extension has it.
void* sim_order() { return new dos::Order; }
void sim_order_delete(void* order) { delete static_cast<dos::Order*>(order); }
void sim_order_serve(void* order) {
  // The machines have cores for the CPU lane. Here its thread works for a moment only, and does not wait for a core.
  sched_param before, first{1};
  int policy;
  pthread_getschedparam(pthread_self(), &policy, &before);
  pthread_setschedparam(pthread_self(), SCHED_RR, &first);  // where the system permits
  static_cast<dos::Order*>(order)->serve();
  pthread_setschedparam(pthread_self(), policy, &before);
}
void sim_order_enter(void* order, long place) { static_cast<dos::Order*>(order)->enter(place); }
void sim_order_leave(void* order, long place) { static_cast<dos::Order*>(order)->leave(place); }
void sim_order_await_begin(void* order, double seconds) {
  sim_pay();
  static_cast<dos::Order*>(order)->await_begin(seconds);
}
void sim_order_await_end(void* order, long place) { sim_pay(), static_cast<dos::Order*>(order)->await_end(place); }
void sim_order_stop(void* order) { static_cast<dos::Order*>(order)->stop(); }
void sim_order_close(void* order) { static_cast<dos::Order*>(order)->close(); }
// times: of the start and the end. Returns whether it has run.
int sim_order_update(void* order, long place, double parameters, double rate, double traffic, int threads,
                     double* times) {
  dos::Order::Times ran;
  sim_pay();
  const auto update = [&] {
    sim_paid();  // what serves is none of the machine's time
    sim_host_update(parameters, rate, traffic, threads);
  };
  if (!static_cast<dos::Order*>(order)->run(place, update, &ran)) return 0;
  times[0] = ran.start, times[1] = ran.end;
  return 1;
}
// Whether an event has ended, as dos::Arrivals asks.
int sim_query(void* event) { return guard().queryEvent(event) ? 0 : dos::Arrivals::kNotReady; }
// The runtime's functions, as dos::Runtime calls them. Streams are given by their number, memory as tensors have it.
int sim_wait(void* stream, void* event, unsigned) {
  guard().block(event, Guard::stream_of((intptr_t)stream));
  return 0;
}
int sim_record(void* event, void* stream) {
  guard().record(&event, Guard::stream_of((intptr_t)stream), 0, c10::EventFlag::BACKEND_DEFAULT);
  return 0;
}
int sim_copy(void* to, const void* from, size_t n, int kind, void* stream) {
  const bool to_device = kind == 1;
  auto& mine = queue((intptr_t)stream);
  if (dry) {
    Call call(&Dry::memcpy_s);
    mine.copy(to_device ? timed::H2D : timed::D2H, n);
    return 0;
  }
  const void* host = to_device ? from : to;
  if (!is_pinned(host, n)) return 1;
  const auto delta = shadow_base - protected_base;
  char *there = (char*)to + (to_device ? delta : 0), *here = (char*)from + (to_device ? 0 : delta);
  mine.put(to_device ? "copy to device" : "copy to host", [=] { check_pinned(host), memcpy(there, here, n); });
  return 0;
}
void sim_sleep(int us);
void sim_pause(int64_t) { sim_sleep(0); }
// A kernel: the address of a function of its blocks and arguments, here words of which there are at most ARGUMENTS. That
// of a dry accelerator is the nanoseconds for which it runs.
constexpr int ARGUMENTS = 6;
using Words = std::array<uint64_t, ARGUMENTS>;
int sim_kernel(void* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
               void* stream, void** arguments, void**) {
  auto& mine = queue((intptr_t)stream);
  if (dry) {
    Call call(&Dry::launch_s);
    mine.compute(LEAST_S + 1e-9 * (uintptr_t)function);
    return 0;
  }
  Words words;
  for (int i = 0; i < ARGUMENTS; ++i) words[i] = *static_cast<uint64_t*>(arguments[i]);
  mine.put("kernel", [=] { reinterpret_cast<void (*)(unsigned, const Words&)>(function)(blocks, words); });
  return 0;
}
// As the kernel of dos/kernels/triton_bits.py. words: the table, its runs, the sums, the answers or 0, bytes of an element.
void sim_sums(unsigned blocks, const Words& words) {
  constexpr int64_t ELEMENTS = 2048 * 16;
  const auto here = [](uint64_t address) { return (char*)address + (shadow_base - protected_base); };
  const auto* rows = (const std::array<int64_t, 4>*)here(words[0]);
  auto* sums = (int64_t*)here(words[2]);
  for (const auto* run = rows; run < rows + words[1]; ++run) {
    const auto [address, numel, first, behind] = *run;
    for (int64_t block = 0; block * ELEMENTS < numel; ++block) {
      uint64_t total = 0;
      for (int64_t i = block * ELEMENTS; i < std::min(numel, (block + 1) * ELEMENTS); ++i) {
        const char* at = here(address) + i * words[4];
        const int64_t bits = words[4] == 4 ? *(const int32_t*)at : *(const int16_t*)at;
        uint32_t drawn = (uint32_t)i * 0x9E3779B1u;
        drawn = ((drawn ^ (drawn >> 15)) * 0x85EBCA6Bu) | 1;
        total += (uint64_t)bits * drawn;
      }
      if (words[3])
        here(words[3])[first + block] = (uint64_t)sums[first + block] != total;
      else
        sums[first + block] = total;
    }
  }
}
// The runtime of a dry accelerator, as the extension has it. most: bytes of a piece.
void* sim_runtime(size_t most) {
  return new dos::Runtime(sim_wait, sim_record, sim_copy, sim_pause, sim_kernel, most);
}
// function, answer: of a kernel; 0: there is none.
int sim_runtime_queue(void* runtime, size_t stream, const uintptr_t* waits, long n, size_t start,
                      const std::array<uintptr_t, 3>* copies, long count, int kind, size_t end, int64_t* moved,
                      size_t function, const std::array<uintptr_t, 3>* answer) {
  const dos::Runtime::Kernel kernel{function, 0, 0, 0, {}, *answer};
  return static_cast<dos::Runtime*>(runtime)->queue(
      {stream, {waits, waits + n}, start, end, {copies, copies + count}, kind, function ? &kernel : nullptr}, moved);
}
// What the CPU lane waits for, as the extension has it.
void* sim_arrivals() { return new dos::Arrivals(sim_query); }
void sim_arrivals_delete(void* arrivals) { delete static_cast<dos::Arrivals*>(arrivals); }
void sim_arrivals_give(void* arrivals, long number, long rank, const uintptr_t* events, long n, long untold) {
  static_cast<dos::Arrivals*>(arrivals)->give(number, rank, {events, events + n}, untold);
}
void sim_arrivals_tell(void* arrivals, long number, const uintptr_t* events, long n) {
  static_cast<dos::Arrivals*>(arrivals)->tell(number, {events, events + n});
}
long sim_arrivals_take(void* arrivals, long* place) {
  sim_pay();
  const auto [number, before] = static_cast<dos::Arrivals*>(arrivals)->take();
  *place = before;
  return number;
}
void sim_arrivals_end(void* arrivals) { static_cast<dos::Arrivals*>(arrivals)->end(); }
void sim_arrivals_close(void* arrivals) { static_cast<dos::Arrivals*>(arrivals)->close(); }
void sim_arrivals_fail(void* arrivals) { static_cast<dos::Arrivals*>(arrivals)->fail(); }
int sim_arrivals_wait(void* arrivals, double seconds) {
  sim_pay();
  return static_cast<dos::Arrivals*>(arrivals)->wait(seconds);
}
long sim_arrivals_waiting(void* arrivals) { return static_cast<dos::Arrivals*>(arrivals)->waiting(); }
// When the last updates on the CPU began and ended, at most n of them; how many there are. Forgets them.
int sim_host_updates(double* begins, double* ends, int n) {
  return dry->at_once([&](auto&) {
    int found = std::min<int>(n, dry->updates.size());
    for (int i = 0; i < found; ++i) std::tie(begins[i], ends[i]) = dry->updates[i];
    dry->updates.clear();
    return found;
  });
}
// When a copy, a kernel of an update or an update on the CPU was first issued since this was last asked.
double sim_issued() {
  return dry->at_once([&](auto&) { return std::exchange(dry->issued, timed::NEVER); });
}
double sim_now() { return dry->now(); }
void sim_sleep(int us) {
  if (dry) {
    Call call(&Dry::launch_s);
    return queue(current_stream).compute(LEAST_S + us / 1e6);
  }
  queue(current_stream).put("sleep", [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}
void sim_launch(void (*run)(long), long number) {
  queue(current_stream).put("launch", [=] { run(number); });
}
long sim_shadow() { return shadow_base - protected_base; }
void sim_empty_cache() {
  std::unique_lock<std::shared_mutex> held;
  if (dry) held = std::unique_lock<std::shared_mutex>(dry->freeing);  // as an H200 did until the device was idle
  allocator().emptyCache({0, 0});
}
void sim_sync_debug(int on) { forbid_sync = on; }
void sim_delays(double probability, int most_us) { config.probability = probability, config.most_us = most_us; }
void sim_capacity(size_t bytes) {
  std::lock_guard<std::mutex> held(allocator().mutex);
  allocator().capacity = bytes;
}
void sim_others(size_t bytes) {
  std::lock_guard<std::mutex> held(allocator().mutex);
  allocator().others = bytes;
}
void sim_fail_in(long n) {
  std::lock_guard<std::mutex> held(allocator().mutex);
  allocator().fail_in = n;
}
void sim_fail_share(double share, unsigned seed) {
  std::lock_guard<std::mutex> held(allocator().mutex);
  allocator().fail_share = share;
  allocator().random.seed(seed);
}
long sim_syncs() { return syncs; }
const char* sim_slow() {
  static std::string text;
  std::lock_guard<std::mutex> held(slow_mutex);
  text.clear();
  for (auto& each : slow) text += each + " ";
  return text.c_str();
}
}
