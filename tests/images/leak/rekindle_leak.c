// SPDX-License-Identifier: GPL-2.0
/*
 * Leaks of kernel memory, for experiments on rejuvenation: the injector of "Towards Fast OS Rejuvenation" (section 5.3). A piece of
 * memory is allocated, written and forgotten, at intervals that are exponentially distributed. tests/images/README.md has its interface.
 *
 * Parameters, in /sys/module/rekindle_leak/parameters:
 *
 *   mean_ms       mean of the interval; 0: none (the default). Written: the next interval is drawn anew
 *   size          bytes of a piece, 1024 unless set, 8 to 131072
 *   seed          of the intervals. Written: they begin anew
 *   leak_now      written: so many MiB at once, in pieces; read: the sum of what was asked for
 *   events        pieces that were leaked, read only
 *   leaked_bytes  what the allocator took for them, read only
 *   failed        pieces for which there was no memory, read only
 *
 * Nothing is ever freed, and the module cannot be unloaded: only another kernel, or an older memory, has the memory back.
 */
#include <linux/atomic.h>
#include <linux/bitops.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/prandom.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#define PIECE 1024u
#define LEAST 8u
#define MOST 131072u
#define MOST_MIB 65536u
#define MOST_MS 86400000u
#define LEAST_MS 1u

static unsigned int mean_ms;
static unsigned int size = PIECE;
static unsigned int seed = 1;
static unsigned long leak_now;
static atomic64_t events = ATOMIC64_INIT(0);
static atomic64_t leaked_bytes = ATOMIC64_INIT(0);
static atomic64_t failed = ATOMIC64_INIT(0);

static struct rnd_state rnd;
static DEFINE_MUTEX(lock); /* of all above but for the counters */
static bool is_loaded;     /* parameters given to insmod are set before there is anything to begin */

static void at_its_time(struct work_struct *unused);
static DECLARE_DELAYED_WORK(next, at_its_time);

static bool leak(void)
{
	unsigned int bytes = READ_ONCE(size);
	void *piece = kmalloc(bytes, GFP_KERNEL | __GFP_NOWARN | __GFP_NORETRY);

	if (!piece) {
		atomic64_inc(&failed);
		return false;
	}
	memset(piece, 0xa5, bytes);
	atomic64_inc(&events);
	atomic64_add(ksize(piece), &leaked_bytes);
	return true;
}

/*
 * -ln(u) of a u that is evenly distributed over (0, 1], times 2^16: there is no floating point in a kernel. u = 2^-k * m with m in
 * [1, 2): -ln(u) = k ln(2) - ln(m), and ln(m) = 2 artanh((m - 1) / (m + 1)), whose series gives five digits with four terms.
 */
static u64 minus_ln(u32 drawn)
{
	u64 u = (u64)drawn + 1; /* 1 to 2^32 */
	unsigned int power = fls64(u) - 1;
	u64 m = u << (32 - power); /* 2^32 to 2^33 */
	u64 z = div64_u64((m - (1ULL << 32)) << 16, (m + (1ULL << 32)) >> 14) << 2; /* (m - 1) / (m + 1), times 2^32 */
	u64 square = (z * z) >> 32;
	u64 ln = z, term = z;
	unsigned int of;

	for (of = 3; of <= 7; of += 2) {
		term = (term * square) >> 32;
		ln += div_u64(term, of);
	}
	ln >>= 15; /* twice, times 2^16 */
	return (32 - power) * 45426ULL - min(ln, (32 - power) * 45426ULL);
}

static u64 interval_ms(void)
{
	u64 ms = (minus_ln(prandom_u32_state(&rnd)) * mean_ms) >> 16;

	return max_t(u64, ms, LEAST_MS);
}

static void draw(void)
{
	if (is_loaded && mean_ms)
		mod_delayed_work(system_wq, &next, msecs_to_jiffies(interval_ms()));
}

static void at_its_time(struct work_struct *unused)
{
	mutex_lock(&lock);
	if (mean_ms)
		leak();
	draw();
	mutex_unlock(&lock);
}

static int set_mean(const char *text, const struct kernel_param *param)
{
	int result;

	mutex_lock(&lock);
	result = param_set_uint_minmax(text, param, 0, MOST_MS);
	if (!result)
		draw();
	mutex_unlock(&lock);
	return result;
}

static int set_size(const char *text, const struct kernel_param *param)
{
	return param_set_uint_minmax(text, param, LEAST, MOST);
}

static int set_seed(const char *text, const struct kernel_param *param)
{
	int result;

	mutex_lock(&lock);
	result = param_set_uint(text, param);
	if (!result) {
		prandom_seed_state(&rnd, seed);
		draw();
	}
	mutex_unlock(&lock);
	return result;
}

static int set_now(const char *text, const struct kernel_param *param)
{
	unsigned long asked;
	s64 wanted;
	int result = kstrtoul(text, 0, &asked);

	if (result)
		return result;
	if (asked > MOST_MIB)
		return -ERANGE;
	mutex_lock(&lock);
	wanted = atomic64_read(&leaked_bytes) + ((s64)asked << 20);
	while (atomic64_read(&leaked_bytes) < wanted && !result) {
		result = leak() ? 0 : -ENOMEM;
		cond_resched();
	}
	if (!result)
		leak_now += asked;
	mutex_unlock(&lock);
	return result;
}

static int get_counter(char *text, const struct kernel_param *param)
{
	return sysfs_emit(text, "%lld\n", (long long)atomic64_read((atomic64_t *)param->arg));
}

static const struct kernel_param_ops mean_ops = { .set = set_mean, .get = param_get_uint };
static const struct kernel_param_ops size_ops = { .set = set_size, .get = param_get_uint };
static const struct kernel_param_ops seed_ops = { .set = set_seed, .get = param_get_uint };
static const struct kernel_param_ops now_ops = { .set = set_now, .get = param_get_ulong };
static const struct kernel_param_ops counter_ops = { .get = get_counter };

module_param_cb(mean_ms, &mean_ops, &mean_ms, 0644);
MODULE_PARM_DESC(mean_ms, "mean of the interval in milliseconds; 0: none");
module_param_cb(size, &size_ops, &size, 0644);
MODULE_PARM_DESC(size, "bytes of a piece");
module_param_cb(seed, &seed_ops, &seed, 0644);
MODULE_PARM_DESC(seed, "of the intervals");
module_param_cb(leak_now, &now_ops, &leak_now, 0644);
MODULE_PARM_DESC(leak_now, "MiB to leak at once");
module_param_cb(events, &counter_ops, &events, 0444);
MODULE_PARM_DESC(events, "pieces leaked");
module_param_cb(leaked_bytes, &counter_ops, &leaked_bytes, 0444);
MODULE_PARM_DESC(leaked_bytes, "what the allocator took for them");
module_param_cb(failed, &counter_ops, &failed, 0444);
MODULE_PARM_DESC(failed, "pieces for which there was no memory");

static int __init begin(void)
{
	mutex_lock(&lock);
	prandom_seed_state(&rnd, seed);
	is_loaded = true;
	draw();
	mutex_unlock(&lock);
	return 0;
}

module_init(begin);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Leaks of kernel memory, for experiments on rejuvenation");
