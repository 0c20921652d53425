/* Which of the libraries that setup.py makes of these sources the CPU and its system can run. Only
 * the baseline's copy of this is called: the others may hold instructions that the CPU lacks. */
#include <string.h>

#include "native.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>

/* At 128 bits SVE does no more at once than NEON, which the baseline has. */
static int runs(const char *level)
{
    const unsigned long sve = 1ul << 22; /* HWCAP_SVE */
    const int get_length = 51;           /* PR_SVE_GET_VL: flags above 16 bits of bytes */
    return !strcmp(level, "sve") && (getauxval(AT_HWCAP) & sve) &&
           (prctl(get_length) & 0xffff) > 16;
}
#elif defined(__x86_64__)
static int runs_v3(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

static int runs(const char *level)
{
    __builtin_cpu_init();
    if (!strcmp(level, "v3"))
        return runs_v3();
    return !strcmp(level, "v4") && runs_v3() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
static int runs(const char *level)
{
    (void)level;
    return 0;
}
#endif

/* Whether the level's library can run here. */
EXPORT int64_t mmkv_runs(const char *level)
{
    return !strcmp(level, "baseline") || runs(level);
}
