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
constexpr std::size_t kRounds = 5;                    // windows of each way to read

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

// A way to read `nbytes` (a multiple of kChunk): loads of one width, at one place or at several
// side by side.  Hardware prefetchers and miss buffers differ, so on one processor a single stream
// of 32-byte loads is fastest, on another four streams of 64-byte ones: all of them are tried.
using Read = std::uint64_t (*)(const std::uint8_t* data, std::size_t nbytes);
constexpr std::size_t kLines = 4;  // cache lines of a stream between two looks at the loop counter
constexpr std::size_t kLine = 64;

template <std::size_t kStreams>
std::uint64_t read_portable(const std::uint8_t* data, std::size_t nbytes) {
  const std::size_t stride = nbytes / kStreams;
  std::uint64_t sums[kLines] = {};
  for (std::size_t i = 0; i < stride; i += kLines * sizeof(std::uint64_t))
    for (std::size_t stream = 0; stream < kStreams; ++stream)
      for (std::size_t word = 0; word < kLines; ++word)
        sums[word] ^= reinterpret_cast<const std::uint64_t*>(data + stream * stride + i)[word];
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}

#if defined(__x86_64__)
template <std::size_t kStreams>
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint8_t* data,
                                                        std::size_t nbytes) {
  constexpr std::size_t kLoads = kLines * kLine / sizeof(__m256i);
  const std::size_t stride = nbytes / kStreams;
  __m256i sums[kLoads] = {};
  for (std::size_t i = 0; i < stride; i += kLines * kLine)
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const auto* words = reinterpret_cast<const __m256i*>(data + stream * stride + i);
      for (std::size_t load = 0; load < kLoads; ++load)
        sums[load] = _mm256_xor_si256(sums[load], _mm256_load_si256(words + load));
    }
  for (std::size_t load = 1; load < kLoads; ++load)
    sums[0] = _mm256_xor_si256(sums[0], sums[load]);
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums[0]);
  return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3];
}

template <std::size_t kStreams>
__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint8_t* data,
                                                             std::size_t nbytes) {
  const std::size_t stride = nbytes / kStreams;
  __m512i sums[kStreams * kLines] = {};
  for (std::size_t i = 0; i < stride; i += kLines * kLine)
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const std::uint8_t* lines = data + stream * stride + i;
      for (std::size_t line = 0; line < kLines; ++line) {
        __m512i& sum = sums[stream * kLines + line];
        sum = _mm512_xor_si512(sum, _mm512_load_si512(lines + line * kLine));
      }
    }
  for (std::size_t i = 1; i < kStreams * kLines; ++i) sums[0] = _mm512_xor_si512(sums[0], sums[i]);
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, sums[0]);
  return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3] ^ lanes[4] ^ lanes[5] ^ lanes[6] ^ lanes[7];
}
#endif

// The ways to read that this processor has.
std::vector<Read> reads_here() {
  std::vector<Read> reads;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) reads = {read_avx512<1>, read_avx512<4>};
  if (__builtin_cpu_supports("avx2")) reads.insert(reads.end(), {read_avx2<1>, read_avx2<4>});
#endif
  if (reads.empty()) reads = {read_portable<1>, read_portable<4>};
  return reads;
}

// Private memory of one thread, touched first by that thread, on huge pages where the system has
// them: fewer TLB misses, as vLLM's weights have.
class Buffer {
 public:
  explicit Buffer(std::size_t nbytes) : nbytes_(nbytes) {
    mapped_ = mmap(nullptr, nbytes_ + kHugePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!valid()) return;
    const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
    data_ = reinterpret_cast<std::uint8_t*>((address + kHugePage - 1) & ~(kHugePage - 1));
    madvise(data_, nbytes_, MADV_HUGEPAGE);  // a hint
    std::memset(data_, 1, nbytes_);
  }
  ~Buffer() {
    if (valid()) munmap(mapped_, nbytes_ + kHugePage);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool valid() const { return mapped_ != MAP_FAILED; }
  const std::uint8_t* bytes() const { return data_; }
  std::size_t size() const { return nbytes_; }

 private:
  static constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21;
  std::size_t nbytes_;
  void* mapped_;
  std::uint8_t* data_ = nullptr;
};

using Clock = std::chrono::steady_clock;

// What the threads of one measurement share.  Ways to read take turns, a window of time each.
struct Race {
  std::vector<Read> reads = reads_here();
  Clock::duration window{};
  Clock::time_point start;
  std::atomic<std::size_t> ready{0};
  std::atomic<int> error{0};
  std::atomic<bool> go{false};

  std::size_t windows() const { return kRounds * reads.size(); }
};

struct Lap {
  std::vector<double> rates;  // bytes per second in each window
  std::uint64_t sum = 0;      // kept so that the reads are not optimised away
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

void read_in_windows(const Buffer& buffer, const Race& race, Lap& lap) {
  std::size_t offset = 0;
  const auto read_chunk = [&](Read read) {
    lap.sum ^= read(buffer.bytes() + offset, kChunk);
    offset = offset + kChunk < buffer.size() ? offset + kChunk : 0;
    return Clock::now();
  };
  Clock::time_point end = race.start;
  for (std::size_t window = 0; window < race.windows(); ++window) {
    end += race.window;
    const Read read = race.reads[window % race.reads.size()];
    const Clock::time_point began = read_chunk(read);  // this one warms the way up
    Clock::time_point now;
    double nbytes = 0;
    do {
      now = read_chunk(read);
      nbytes += static_cast<double>(kChunk);
    } while (now < end);
    lap.rates.push_back(nbytes / std::chrono::duration<double>(now - began).count());
  }
}

void run_reader(int cpu, std::size_t nbytes, Race& race, Lap& lap) {
  int error = pin_to(cpu);
  if (error == 0) {
    Buffer buffer(nbytes);
    if (buffer.valid()) {
      race.ready.fetch_add(1);
      while (!race.go.load(std::memory_order_acquire)) std::this_thread::yield();
      if (race.error.load() == 0) read_in_windows(buffer, race, lap);
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

// What all threads read together in the way that is fastest here: the median of its windows, so
// that neither a disturbance nor a burst decides.
double typical_rate(const Race& race, const std::vector<Lap>& laps) {
  double best = 0;
  for (std::size_t read = 0; read < race.reads.size(); ++read) {
    std::vector<double> rates;
    for (std::size_t window = read; window < race.windows(); window += race.reads.size()) {
      double together = 0;
      for (const Lap& lap : laps) together += lap.rates[window];
      rates.push_back(together);
    }
    std::nth_element(rates.begin(), rates.begin() + kRounds / 2, rates.end());
    best = std::max(best, rates[kRounds / 2]);
  }
  return best;
}

double read_bandwidth(const std::vector<int>& cpus, std::size_t nbytes_per_thread, double seconds) {
  const bool sane =
      std::all_of(cpus.begin(), cpus.end(), [](int cpu) { return cpu >= 0 && cpu < 65536; });
  if (cpus.empty() || !sane || !(seconds > 0 && seconds <= 600) || nbytes_per_thread == 0 ||
      nbytes_per_thread > SIZE_MAX - kChunk)
    throw_os_error(EINVAL, "read_bandwidth");
  const std::size_t nbytes = (nbytes_per_thread + kChunk - 1) / kChunk * kChunk;
  Race race;
  race.window = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds / static_cast<double>(race.windows())));
  std::vector<Lap> laps(cpus.size());
  {
    py::gil_scoped_release release;
    std::vector<std::thread> threads = start_readers(cpus, nbytes, race, laps);
    while (race.ready.load() < threads.size())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    race.start = Clock::now();
    race.go.store(true, std::memory_order_release);
    for (std::thread& thread : threads) thread.join();
  }
  if (race.error.load() != 0) throw_os_error(race.error.load(), "read_bandwidth");
  volatile std::uint64_t sink = 0;
  for (const Lap& lap : laps) sink = sink ^ lap.sum;
  return typical_rate(race, laps);
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
