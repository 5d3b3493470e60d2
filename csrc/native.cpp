// Where pages are, where they should be, and how fast a socket reads.
//
// System calls are made directly: libnuma is not needed.  Every function that fails raises OSError
// with the errno of the call.  placement/native.py is the typed face of this module.

#include <linux/mempolicy.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace {

constexpr std::size_t kMaskWords = 1024 / (CHAR_BIT * sizeof(unsigned long));
constexpr std::size_t kQueryBatch = 1 << 14;          // pages of one move_pages call
constexpr std::size_t kChunk = std::size_t{1} << 22;  // bytes read between two looks at the clock

[[noreturn]] void throw_os_error(int error, const std::string& what) {
  errno = error;
  PyErr_SetObject(PyExc_OSError, py::make_tuple(error, what + ": " + std::strerror(error)).ptr());
  throw py::error_already_set();
}

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

struct NodeMask {
  unsigned long words[kMaskWords] = {};
  // The kernel takes the number of bits plus one.
  static constexpr unsigned long kBits = kMaskWords * CHAR_BIT * sizeof(unsigned long) + 1;

  explicit NodeMask(const std::vector<int>& nodes) {
    constexpr int word_bits = CHAR_BIT * sizeof(unsigned long);
    for (int node : nodes) {
      if (node < 0 || node >= static_cast<int>(kBits) - 1) throw_os_error(EINVAL, "NUMA node");
      words[node / word_bits] |= 1UL << (node % word_bits);
    }
  }
};

int policy_of(const std::vector<int>& nodes, bool interleave) {
  if (nodes.empty()) throw_os_error(EINVAL, "no NUMA node given");
  return interleave ? MPOL_INTERLEAVE : MPOL_BIND;
}

// Every page that has at least one byte of the range.
struct Pages {
  std::uintptr_t first;
  std::size_t count;

  Pages(std::uintptr_t address, std::size_t nbytes) {
    const std::uintptr_t size = page_size();
    if (address + nbytes < address) throw_os_error(EINVAL, "address range wraps around");
    first = address & ~(size - 1);
    count = nbytes == 0 ? 0 : (address + nbytes - first + size - 1) / size;
  }
};

void bind_range(std::uintptr_t address, std::size_t nbytes, const std::vector<int>& nodes,
                bool move, bool interleave) {
  const int policy = policy_of(nodes, interleave);
  const NodeMask mask(nodes);
  const Pages pages(address, nbytes);
  if (pages.count == 0) return;
  long result;
  {
    py::gil_scoped_release release;
    result = syscall(SYS_mbind, pages.first, pages.count * page_size(), policy, mask.words,
                     NodeMask::kBits, move ? MPOL_MF_MOVE : 0);
  }
  if (result != 0) throw_os_error(errno, "mbind");
}

void set_membind(const std::vector<int>& nodes, bool interleave) {
  long result;
  if (nodes.empty()) {
    result = syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);
  } else {
    const NodeMask mask(nodes);
    result = syscall(SYS_set_mempolicy, policy_of(nodes, interleave), mask.words, NodeMask::kBits);
  }
  if (result != 0) throw_os_error(errno, "set_mempolicy");
}

std::map<int, std::size_t> pages_per_node(std::uintptr_t address, std::size_t nbytes,
                                          std::size_t sample) {
  const Pages pages(address, nbytes);
  const std::size_t asked = sample == 0 ? pages.count : std::min(sample, pages.count);
  std::map<int, std::size_t> counts;
  std::vector<void*> addresses;
  std::vector<int> status;
  py::gil_scoped_release release;
  for (std::size_t done = 0; done < asked; done += addresses.size()) {
    addresses.clear();
    for (std::size_t i = done; i < std::min(done + kQueryBatch, asked); ++i) {
      // 128 bits: i * count overflows 64 for terabytes of 4 KiB pages.
      const auto page =
          static_cast<std::size_t>(static_cast<unsigned __int128>(i) * pages.count / asked);
      addresses.push_back(reinterpret_cast<void*>(pages.first + page * page_size()));
    }
    status.assign(addresses.size(), -ENOENT);
    if (syscall(SYS_move_pages, 0, addresses.size(), addresses.data(), nullptr, status.data(), 0) !=
        0) {
      const int error = errno;
      py::gil_scoped_acquire acquire;
      throw_os_error(error, "move_pages");
    }
    for (int node : status) ++counts[node < 0 ? -1 : node];
  }
  return counts;
}

// ---------------------------------------------------------------------------------------------
// Bandwidth

// Reads `nbytes` (a multiple of kChunk) as four streams side by side: a core has more misses in
// flight that way than with one stream, since hardware prefetchers stop at page borders.
using ReadChunk = std::uint64_t (*)(const std::uint8_t* data, std::size_t nbytes);
constexpr std::size_t kStreams = 4;

template <std::size_t kLanes>
std::uint64_t fold(const std::uint64_t (&lanes)[kLanes]) {
  std::uint64_t sum = 0;
  for (std::uint64_t lane : lanes) sum ^= lane;
  return sum;
}

std::uint64_t read_portable(const std::uint8_t* data, std::size_t nbytes) {
  const std::size_t stride = nbytes / kStreams;
  std::uint64_t sums[kStreams] = {};
  for (std::size_t i = 0; i < stride; i += sizeof(std::uint64_t))
    for (std::size_t stream = 0; stream < kStreams; ++stream)
      sums[stream] ^= *reinterpret_cast<const std::uint64_t*>(data + stream * stride + i);
  return fold(sums);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint8_t* data,
                                                        std::size_t nbytes) {
  const std::size_t stride = nbytes / kStreams;
  __m256i sums[kStreams] = {};
  for (std::size_t i = 0; i < stride; i += sizeof(__m256i))
    for (std::size_t stream = 0; stream < kStreams; ++stream)
      sums[stream] = _mm256_xor_si256(
          sums[stream],
          _mm256_load_si256(reinterpret_cast<const __m256i*>(data + stream * stride + i)));
  alignas(32) std::uint64_t lanes[kStreams * 4];
  for (std::size_t stream = 0; stream < kStreams; ++stream)
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + stream * 4), sums[stream]);
  return fold(lanes);
}

__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint8_t* data,
                                                             std::size_t nbytes) {
  const std::size_t stride = nbytes / kStreams;
  __m512i sums[kStreams] = {};
  for (std::size_t i = 0; i < stride; i += sizeof(__m512i))
    for (std::size_t stream = 0; stream < kStreams; ++stream)
      sums[stream] = _mm512_xor_si512(
          sums[stream],
          _mm512_load_si512(reinterpret_cast<const __m512i*>(data + stream * stride + i)));
  alignas(64) std::uint64_t lanes[kStreams * 8];
  for (std::size_t stream = 0; stream < kStreams; ++stream)
    _mm512_store_si512(reinterpret_cast<__m512i*>(lanes + stream * 8), sums[stream]);
  return fold(lanes);
}
#endif

ReadChunk widest_read() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_portable;
}

// Private memory of one thread, touched first by that thread.
class Buffer {
 public:
  explicit Buffer(std::size_t nbytes) : nbytes_(nbytes) {
    data_ = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) return;
    madvise(data_, nbytes_, MADV_HUGEPAGE);  // a hint: fewer TLB misses, as vLLM's weights have
    std::memset(data_, 1, nbytes_);
  }
  ~Buffer() {
    if (valid()) munmap(data_, nbytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool valid() const { return data_ != MAP_FAILED; }
  const std::uint8_t* bytes() const { return static_cast<const std::uint8_t*>(data_); }
  std::size_t size() const { return nbytes_; }

 private:
  std::size_t nbytes_;
  void* data_;
};

using Clock = std::chrono::steady_clock;

// What the threads of one measurement share.
struct Race {
  std::atomic<std::size_t> ready{0};
  std::atomic<int> error{0};
  std::atomic<bool> go{false};
  Clock::time_point start, deadline;
};

struct Lap {
  std::size_t nbytes = 0;
  Clock::time_point end;
  std::uint64_t sum = 0;  // kept so that the reads are not optimised away
};

int pin_to(int cpu) {
  const std::size_t size = CPU_ALLOC_SIZE(cpu + 1);
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  CPU_ZERO_S(size, set);
  CPU_SET_S(cpu, size, set);
  const int error = pthread_setaffinity_np(pthread_self(), size, set);
  CPU_FREE(set);
  return error;
}

void read_until_deadline(const Buffer& buffer, const Race& race, Lap& lap) {
  const ReadChunk read = widest_read();
  for (std::size_t offset = 0;; offset = offset + kChunk < buffer.size() ? offset + kChunk : 0) {
    lap.sum ^= read(buffer.bytes() + offset, kChunk);
    lap.nbytes += kChunk;
    lap.end = Clock::now();
    if (lap.end >= race.deadline) return;
  }
}

void run_reader(int cpu, std::size_t nbytes, Race& race, Lap& lap) {
  int error = pin_to(cpu);
  if (error == 0) {
    Buffer buffer(nbytes);
    if (buffer.valid()) {
      race.ready.fetch_add(1);
      while (!race.go.load(std::memory_order_acquire)) std::this_thread::yield();
      if (race.error.load() == 0) read_until_deadline(buffer, race, lap);
      return;
    }
    error = ENOMEM;
  }
  race.error.store(error);
  race.ready.fetch_add(1);
}

std::vector<std::thread> start_readers(const std::vector<int>& cpus, std::size_t nbytes, Race& race,
                                       std::vector<Lap>& laps) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < cpus.size(); ++i) {
    try {
      threads.emplace_back(run_reader, cpus[i], nbytes, std::ref(race), std::ref(laps[i]));
    } catch (const std::system_error& failure) {
      race.error.store(failure.code().value());
      break;
    }
  }
  return threads;
}

double read_bandwidth(const std::vector<int>& cpus, std::size_t nbytes_per_thread, double seconds) {
  const bool sane =
      std::all_of(cpus.begin(), cpus.end(), [](int cpu) { return cpu >= 0 && cpu < 65536; });
  if (cpus.empty() || !sane || !(seconds > 0 && seconds <= 600) || nbytes_per_thread == 0 ||
      nbytes_per_thread > SIZE_MAX - kChunk)
    throw_os_error(EINVAL, "read_bandwidth");
  const std::size_t nbytes = (nbytes_per_thread + kChunk - 1) / kChunk * kChunk;
  Race race;
  std::vector<Lap> laps(cpus.size());
  {
    py::gil_scoped_release release;
    std::vector<std::thread> threads = start_readers(cpus, nbytes, race, laps);
    while (race.ready.load() < threads.size())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    race.start = Clock::now();
    race.deadline = race.start + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(seconds));
    race.go.store(true, std::memory_order_release);
    for (std::thread& thread : threads) thread.join();
  }
  if (race.error.load() != 0) throw_os_error(race.error.load(), "read_bandwidth");
  double total = 0;
  volatile std::uint64_t sink = 0;
  Clock::time_point end = race.start;
  for (const Lap& lap : laps) {
    total += static_cast<double>(lap.nbytes);
    sink = sink ^ lap.sum;
    end = std::max(end, lap.end);
  }
  return total / std::chrono::duration<double>(end - race.start).count();
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Page placement and memory bandwidth; see placement.native.";
  module.def("bind_range", &bind_range, py::arg("address"), py::arg("nbytes"), py::arg("nodes"),
             py::arg("move") = true, py::arg("interleave") = false,
             "Bind the pages of an address range to NUMA nodes; OSError with mbind's errno.");
  module.def("set_membind", &set_membind, py::arg("nodes"), py::arg("interleave") = false,
             "Memory policy of the calling thread; no nodes = the system's default.");
  module.def("pages_per_node", &pages_per_node, py::arg("address"), py::arg("nbytes"),
             py::arg("sample") = 0,
             "Pages of an address range by NUMA node, -1 = not present; sample 0 = all pages.");
  module.def("read_bandwidth", &read_bandwidth, py::arg("cpus"), py::arg("nbytes_per_thread"),
             py::arg("seconds"),
             "Bytes per second that one thread on each CPU reads from its own memory, together.");
}
