/* Another wall clock for a process: LD_PRELOAD this library, and CLOCK_FILE holds the seconds that it is ahead.
 *
 * Every reading of the wall clock is shifted, and every deadline by the wall clock that threads wait for is shifted
 * back, so that waits last as long as they should. Not covered: a wait that has begun when the clock jumps goes on
 * for as long as it would have, where a jump of the machine's clock would end or lengthen it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(name) *)next(#name))
#define YEAR_2001 1000000000 /* no machine is up for so many seconds: a later deadline is by the wall clock */

static void *next(const char *name) { /* x86-64 has two versions of some; programs of this century use the second */
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

static int64_t ahead(void) {
    static const volatile int64_t *shared;
    if (!shared) {
        const char *path = getenv("CLOCK_FILE");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *map = file < 0 ? MAP_FAILED : mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        static const int64_t none = 0;
        shared = map == MAP_FAILED ? &none : map;
        if (file >= 0) close(file);
    }
    return *shared;
}

static struct timespec real_deadline(const struct timespec *given) {
    struct timespec real = *given;
    if (real.tv_sec > YEAR_2001) real.tv_sec -= ahead();
    return real;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(clock_gettime) *real;
    if (!real) real = REAL(clock_gettime);
    int code = real(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec real = real_deadline(until);
    return REAL(pthread_cond_timedwait)(cond, mutex, &real);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    struct timespec real = real_deadline(until);
    return REAL(pthread_cond_clockwait)(cond, mutex, clock, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    struct timespec real = real_deadline(until);
    return REAL(pthread_mutex_timedlock)(mutex, &real);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    struct timespec real = real_deadline(until);
    return REAL(sem_timedwait)(sem, &real);
}

int sem_clockwait(sem_t *restrict sem, clockid_t clock, const struct timespec *restrict until) {
    struct timespec real = real_deadline(until);
    return REAL(sem_clockwait)(sem, clock, &real);
}
