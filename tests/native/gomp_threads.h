// The part of GCC's OpenMP runtime that the kernels call, on threads and barriers that
// ThreadSanitizer knows.  It takes libgomp's own, which it cannot look into, for data races.

#pragma once

#include <pthread.h>

#include <memory>
#include <thread>
#include <vector>

namespace gomp_threads {

struct Team {
  explicit Team(int threads) : size(threads) {
    pthread_barrier_init(&barrier, nullptr, static_cast<unsigned>(threads));
    pthread_mutex_init(&mutex, nullptr);
  }
  ~Team() {
    pthread_barrier_destroy(&barrier);
    pthread_mutex_destroy(&mutex);
  }
  const int size;
  int singles = 0;  // regions for one thread that one has entered
  pthread_barrier_t barrier;
  pthread_mutex_t mutex;
};

inline thread_local Team* team = nullptr;
inline thread_local int number = 0, wanted = 2, singles = 0;

inline void run(void (*work)(void*), void* data, unsigned asked) {
  const int threads = asked > 0 ? static_cast<int>(asked) : wanted;
  Team made(threads);
  const auto member = [&](int own) {
    Team* const before = team;
    const int number_before = number, singles_before = singles;
    team = &made, number = own, singles = 0;
    work(data);
    team = before, number = number_before, singles = singles_before;
  };
  std::vector<std::thread> others;
  for (int own = 1; own < threads; ++own) others.emplace_back(member, own);
  member(0);
  for (std::thread& one : others) one.join();
}

}  // namespace gomp_threads

extern "C" {

void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
  gomp_threads::run(work, data, threads);
}

void GOMP_barrier() {
  if (gomp_threads::team != nullptr) pthread_barrier_wait(&gomp_threads::team->barrier);
}

bool GOMP_single_start() {
  gomp_threads::Team* const team = gomp_threads::team;
  if (team == nullptr) return true;
  const int own = ++gomp_threads::singles;
  pthread_mutex_lock(&team->mutex);
  const bool is_first = team->singles < own;
  if (is_first) team->singles = own;
  pthread_mutex_unlock(&team->mutex);
  return is_first;
}

void GOMP_atomic_start() {
  if (gomp_threads::team != nullptr) pthread_mutex_lock(&gomp_threads::team->mutex);
}

void GOMP_atomic_end() {
  if (gomp_threads::team != nullptr) pthread_mutex_unlock(&gomp_threads::team->mutex);
}

int omp_get_thread_num() { return gomp_threads::number; }
int omp_get_num_threads() { return gomp_threads::team == nullptr ? 1 : gomp_threads::team->size; }
int omp_get_max_threads() { return gomp_threads::wanted; }
int omp_get_num_procs() { return gomp_threads::wanted; }
int omp_in_parallel() { return gomp_threads::team != nullptr; }
void omp_set_num_threads(int threads) { gomp_threads::wanted = threads; }

}  // extern "C"
