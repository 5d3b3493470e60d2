"""Libraries that answer as NVIDIA's do, with the figures of a card, compiled from a few lines of C.

The code that asks them is the real one: ctypes, structures, result codes, another process.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

NOT_SUPPORTED = 3

_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const char *text(unsigned gpu, const char *key) {
  static char line[256], wanted[64];
  snprintf(wanted, sizeof wanted, "%u.%s=", gpu, key);
  FILE *file = fopen(getenv("FAKE_NVIDIA"), "r");
  const char *found = NULL;
  while (file && !found && fgets(line, sizeof line, file))
    if (!strncmp(line, wanted, strlen(wanted))) {
      line[strcspn(line, "\n")] = 0;
      found = line + strlen(wanted);
    }
  if (file) fclose(file);
  return found;
}
static unsigned id(void *device) { return (unsigned)(size_t)device - 1; }
static int number(void *device, const char *key, unsigned *out) {
  const char *found = text(id(device), key);
  if (!found) return 3;
  *out = strtoul(found, 0, 10);
  return 0;
}
static int copied(void *device, const char *key, char *out) {
  const char *found = text(id(device), key);
  if (!found) return 3;
  strcpy(out, found);
  return 0;
}
int nvmlInit_v2(void) { return getenv("FAKE_NVIDIA") ? 0 : 9; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned room) { strcpy(out, "590.44.01"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) {
  for (*out = 0; text(*out, "name"); ++*out) {}
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned gpu, void **out) {
  *out = (void *)(size_t)(gpu + 1);
  return 0;
}
int nvmlDeviceGetName(void *d, char *out, unsigned room) { return copied(d, "name", out); }
int nvmlDeviceGetUUID(void *d, char *out, unsigned room) { return copied(d, "uuid", out); }
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *out) {
  unsigned mib;
  if (number(d, "memory_mib", &mib)) return 3;
  out->total = (unsigned long long)mib << 20;
  return 0;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
int nvmlDeviceGetPciInfo_v3(void *d, struct pci *out) { return copied(d, "pci", out->address); }
int nvmlDeviceGetMemoryBusWidth(void *d, unsigned *out) { return number(d, "bus_bits", out); }
int nvmlDeviceGetMaxClockInfo(void *d, unsigned kind, unsigned *out) {
  return number(d, kind == 2 ? "memory_mhz" : "clock_mhz", out);
}
int nvmlDeviceGetNumGpuCores(void *d, unsigned *out) { return number(d, "cores", out); }
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
  unsigned both;
  if (number(d, "capability", &both)) return 3;
  *major = both / 10, *minor = both % 10;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *out) { return number(d, "gen", out); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *out) { return number(d, "now", out); }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *out) { return number(d, "width", out); }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *out) { return number(d, "width_now", out); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *room, void *out) {
  unsigned there = 0;
  number(d, "processes", &there);
  return there > *room ? 7 : 0;
}
"""

_CUDA = r"""
#include <stdlib.h>
#include <string.h>
static double clock_s;
static double rate(const char *key) { const char *v = getenv(key); return v ? atof(v) : 1e12; }
static int copy(const char *key, unsigned long bytes) { clock_s += bytes / rate(key); return 0; }
int cuInit(unsigned flags) {
  const char *shown = getenv("CUDA_VISIBLE_DEVICES"), *wanted = getenv("FAKE_UUID");
  return shown && wanted && !strcmp(shown, wanted) ? 0 : 100;
}
int cuDeviceGet(int *out, int place) { *out = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = out; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemHostAlloc(void **out, unsigned long bytes, unsigned flags) { *out = out; return 0; }
int cuMemAlloc_v2(void **out, unsigned long bytes) {
  const char *most = getenv("FAKE_FREE");
  if (most && bytes > strtoul(most, 0, 10)) return 2;
  *out = out;
  return 0;
}
int cuMemcpyDtoDAsync_v2(void *a, void *b, size_t n, void *s) { return copy("FAKE_IN", n); }
int cuMemcpyHtoDAsync_v2(void *a, void *b, size_t n, void *s) { return copy("FAKE_TO", n); }
int cuMemcpyDtoHAsync_v2(void *a, void *b, size_t n, void *s) { return copy("FAKE_FROM", n); }
int cuEventCreate(void **out, unsigned flags) { *out = calloc(1, sizeof(double)); return 0; }
int cuEventRecord(void *event, void *stream) { *(double *)event = clock_s; return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuEventElapsedTime(float *out, void *begin, void *end) {
  *out = (*(double *)end - *(double *)begin) * 1e3;
  return 0;
}
"""


@dataclass(frozen=True)
class Card:
    """Figures of a card: those that its driver tells, and those that NVIDIA publishes."""

    name: str
    capability: int
    cores: int
    clock_mhz: int
    """Highest clock of the multiprocessors."""
    bus_bits: int
    memory_mhz: int
    gen: int
    memory_mib: int
    gb_s: float
    """Published memory bandwidth."""
    tflop_s: float
    """Published dense bf16 products (float16 before Ampere), summed in float32."""

    def lines(self, index: int = 0, **changed: object) -> str:
        """What the library answers of it, as GPU `index`; None leaves an answer out."""
        answers: dict[str, object] = {
            "name": self.name, "uuid": f"GPU-{index}", "pci": f"00000000:F{index:X}:00.0",
            "capability": self.capability, "cores": self.cores, "clock_mhz": self.clock_mhz,
            "bus_bits": self.bus_bits, "memory_mhz": self.memory_mhz, "gen": self.gen,
            "now": 1, "width": 16, "width_now": 16, "memory_mib": self.memory_mib,
        } | changed  # fmt: skip
        return "".join(f"{index}.{key}={v}\n" for key, v in answers.items() if v is not None)


CARDS = (
    Card("Tesla V100-SXM2-32GB", 70, 5120, 1530, 4096, 877, 3, 32768, 900, 125),
    Card("Tesla T4", 75, 2560, 1590, 256, 5001, 3, 15360, 320, 65),
    Card("NVIDIA A100-SXM4-80GB", 80, 6912, 1410, 5120, 1593, 4, 81920, 2039, 312),
    Card("NVIDIA A10", 86, 9216, 1695, 384, 6251, 4, 23028, 600, 125),
    Card("NVIDIA RTX A6000", 86, 10752, 2100, 384, 8001, 4, 49140, 768, 154.8),
    Card("NVIDIA GeForce RTX 3060", 86, 3584, 2100, 192, 7501, 4, 12288, 360, 25.5),
    Card("NVIDIA GeForce RTX 3090", 86, 10496, 2100, 384, 9751, 4, 24576, 936, 71),
    Card("NVIDIA GeForce RTX 4090", 89, 16384, 3105, 384, 10501, 4, 24564, 1008, 165.2),
    Card("NVIDIA L4", 89, 7424, 2040, 192, 6251, 4, 23034, 300, 121),
    Card("NVIDIA L40S", 89, 18176, 2520, 384, 9001, 4, 46068, 864, 362),
    Card("NVIDIA RTX 6000 Ada Generation", 89, 18176, 3105, 384, 10001, 4, 49140, 960, 364),
    Card("NVIDIA H100 80GB HBM3", 90, 16896, 1980, 5120, 2619, 5, 81559, 3350, 989),
    Card("NVIDIA H100 NVL", 90, 16896, 1980, 6144, 2619, 5, 95830, 3900, 835),
    Card("NVIDIA H200", 90, 16896, 1980, 6144, 3201, 5, 143771, 4800, 989),
    Card("NVIDIA B200", 100, 18944, 1965, 8192, 3996, 5, 183359, 8000, 2250),
    Card("NVIDIA GeForce RTX 5070 Ti", 120, 8960, 3090, 256, 14001, 5, 16303, 896, 87.9),
    Card("NVIDIA GeForce RTX 5090", 120, 21760, 3090, 512, 14001, 5, 32607, 1792, 209.5),
    Card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
         120, 24064, 3090, 512, 14001, 5, 97887, 1792, 503.8),
)  # fmt: skip


def build(folder: Path) -> Path:
    """Compile libnvidia-ml.so.1 and libcuda.so.1 into a folder, for LD_LIBRARY_PATH."""
    for name, source in (("libnvidia-ml.so.1", _NVML), ("libcuda.so.1", _CUDA)):
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(folder / name)],
            input=source, text=True, check=True,
        )  # fmt: skip
    return folder
