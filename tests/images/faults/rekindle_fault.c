// SPDX-License-Identifier: GPL-2.0
/*
 * Faults put into the running kernel of a guest, for the fault experiment (docs/fault-experiment.md). A fault is a line written to
 * /proc/rekindle-fault; some never return. Reading it lists the kernel stacks, for faults that are put in from outside.
 *
 *   panic                   the kernel panics
 *   alloc COUNT SEED        kmalloc returns NULL, COUNT times
 *   free COUNT SEED         memory that is in use is freed
 *   leak COUNT SEED         every second kfree frees nothing, from now on
 *   bcopy COUNT SEED        a copy runs over its end, by one byte to four pages
 *   stale COUNT SEED        memory is written after it was freed
 *   wild COUNT SEED         eight bytes are written to a random address of the memory
 *   poke ADDRESS OLD NEW    code: the bytes OLD (hexadecimal) at ADDRESS become NEW
 */
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/prandom.h>
#include <linux/proc_fs.h>
#include <linux/sched/signal.h>
#include <linux/sched/task_stack.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>

#define KEPT 256
#define LONGEST_POKE 16
#define SETTLE_MS 100 /* how long memory is watched, or left alone, before something is done to it */

static struct rnd_state rnd;
static void *kept[KEPT]; /* what was allocated last */
static unsigned int kept_at;
static int to_fail;
module_param(to_fail, int, 0444);
MODULE_PARM_DESC(to_fail, "allocations that are still to fail");

static u32 any(u32 below)
{
	return prandom_u32_state(&rnd) % below;
}

/* ------------------------------------------------------------------------------------------------- allocation */
static int allocated(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	void *memory = (void *)regs_return_value(regs);

	if (memory && to_fail > 0 && !any(16)) {
		to_fail--;
		regs_set_return_value(regs, 0); /* what was allocated is lost */
	} else if (memory) {
		kept[kept_at++ % KEPT] = memory;
	}
	return 0;
}

static int forget(struct kprobe *probe, struct pt_regs *regs)
{
	if (any(2))
		regs->di = 0; /* kfree(NULL) */
	return 0;
}

static struct kretprobe allocators[] = {
	{ .kp.symbol_name = "__kmalloc", .handler = allocated },
	{ .kp.symbol_name = "kmalloc_trace", .handler = allocated },
	{ .kp.symbol_name = "__kmalloc_node_track_caller", .handler = allocated },
};
static struct kprobe freeing = { .symbol_name = "kfree", .pre_handler = forget };

/* Watches what is allocated; stays until the guest ends. */
static int watch_allocators(void)
{
	static bool watched;
	int i, error;

	for (i = 0; !watched && i < ARRAY_SIZE(allocators); i++) {
		error = register_kretprobe(&allocators[i]);
		if (error) {
			pr_err("rekindle: cannot watch %s: %d\n", allocators[i].kp.symbol_name, error);
			return error;
		}
	}
	watched = true;
	return 0;
}

static int fail_allocations(int count)
{
	int error = watch_allocators();

	to_fail = error ? 0 : count;
	return error;
}

static int free_used(int count)
{
	int error = watch_allocators();

	if (error)
		return error;
	msleep(SETTLE_MS);
	while (count--)
		kfree(kept[any(min_t(u32, kept_at, KEPT) ?: 1)]);
	return 0;
}

/* The end of a copy, past the end of where it was to go. Not memcpy: the kernel's looks at the object's size. */
static void run_over(volatile u8 *end, u32 length)
{
	while (length--)
		*end++ = length % 251;
}

static int overrun(int count)
{
	int error = watch_allocators();

	if (error)
		return error;
	msleep(SETTLE_MS);
	while (count--) {
		u8 *memory = kept[any(min_t(u32, kept_at, KEPT) ?: 1)];

		if (memory)
			run_over(memory + ksize(memory), 1 + any(4 * PAGE_SIZE));
	}
	return 0;
}

static void write_anything(void *to, size_t length)
{
	prandom_bytes_state(&rnd, to, length);
}

#define MOST_STALE 64
static int write_freed(int count)
{
	static void *pages[MOST_STALE], *objects[MOST_STALE];
	static u32 sizes[MOST_STALE];
	int i;

	count = min(count, 2 * MOST_STALE) / 2;
	for (i = 0; i < count; i++) {
		pages[i] = (void *)__get_free_page(GFP_KERNEL);
		sizes[i] = 64 << any(6);
		objects[i] = kmalloc(sizes[i], GFP_KERNEL);
		if (!pages[i] || !objects[i])
			return -ENOMEM;
	}
	for (i = 0; i < count; i++) {
		free_page((unsigned long)pages[i]);
		kfree(objects[i]);
	}
	msleep(SETTLE_MS);
	for (i = 0; i < count; i++) {
		write_anything(pages[i] + any(PAGE_SIZE / 64) * 64, 64);
		write_anything(objects[i] + any(sizes[i] / 64) * 64, 64);
	}
	return 0;
}

static int write_anywhere(int count)
{
	while (count--) {
		u64 frame = 0x100 + any(get_num_physpages() - 0x100);

		write_anything(__va(frame << PAGE_SHIFT) + any(PAGE_SIZE / 8) * 8, 8);
	}
	return 0;
}

/* ------------------------------------------------------------------------------------------------------- code */
/* Of a stack, or of the kernel's own code. */
static struct page *page_of(unsigned long address)
{
	return is_vmalloc_addr((void *)address) ? vmalloc_to_page((void *)address) :
						  pfn_to_page(__pa(address) >> PAGE_SHIFT);
}

static int poke(unsigned long address, const char *old_text, const char *new_text)
{
	u8 old[LONGEST_POKE], new[LONGEST_POKE];
	size_t length = strlen(old_text) / 2;
	struct page *pages[2];
	u8 *writable;
	int error = -EINVAL;

	if (!length || length > LONGEST_POKE || strlen(new_text) != 2 * length || hex2bin(old, old_text, length) ||
	    hex2bin(new, new_text, length))
		return -EINVAL;
	pages[0] = page_of(address);
	pages[1] = page_of(address + PAGE_SIZE);
	writable = vmap(pages, 2, VM_MAP, PAGE_KERNEL);
	if (!writable)
		return -ENOMEM;
	if (!memcmp(writable + offset_in_page(address), old, length)) {
		memcpy(writable + offset_in_page(address), new, length);
		error = 0;
	}
	vunmap(writable);
	return error;
}

/* ------------------------------------------------------------------------------------------------------- /proc */
static ssize_t fault_write(struct file *file, const char __user *text, size_t length, loff_t *at)
{
	char line[160], name[16] = "", old[2 * LONGEST_POKE + 1], new[2 * LONGEST_POKE + 1];
	unsigned long address;
	int count = 0, error = -EINVAL;
	u64 seed = 0;

	if (length >= sizeof(line) || copy_from_user(line, text, length))
		return -EINVAL;
	line[length] = 0;
	if (sscanf(line, "poke %lx %32s %32s", &address, old, new) == 3) {
		error = poke(address, old, new);
		return error ?: length;
	}
	sscanf(line, "%15s %d %llu", name, &count, &seed);
	prandom_seed_state(&rnd, seed);
	if (!strcmp(name, "panic"))
		panic("rekindle: a fault\n");
	else if (!strcmp(name, "alloc"))
		error = fail_allocations(count);
	else if (!strcmp(name, "free"))
		error = free_used(count);
	else if (!strcmp(name, "leak"))
		error = register_kprobe(&freeing);
	else if (!strcmp(name, "bcopy"))
		error = overrun(count);
	else if (!strcmp(name, "stale"))
		error = write_freed(count);
	else if (!strcmp(name, "wild"))
		error = write_anywhere(count);
	return error ?: length;
}

/* The used part of each kernel stack, as physical ranges. */
static int stacks_show(struct seq_file *out, void *unused)
{
	struct task_struct *process, *task;

	rcu_read_lock();
	for_each_process_thread(process, task) {
		unsigned long at = task->thread.sp, end = (unsigned long)task_stack_page(task) + THREAD_SIZE;

		if (task_stack_page(task) != NULL && end - at < THREAD_SIZE) {
			while (at < end) {
				unsigned long stop = min(end, (at | ~PAGE_MASK) + 1);
				struct page *page = page_of(at);

				if (page)
					seq_printf(out, "%d %llx %lx\n", task->pid,
						   (u64)page_to_phys(page) + offset_in_page(at), stop - at);
				at = stop;
			}
		}
	}
	rcu_read_unlock();
	return 0;
}

static int fault_open(struct inode *inode, struct file *file)
{
	return single_open(file, stacks_show, NULL);
}

static const struct proc_ops operations = {
	.proc_open = fault_open,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
	.proc_write = fault_write,
};

static int __init fault_init(void)
{
	return proc_create("rekindle-fault", 0600, NULL, &operations) ? 0 : -ENOMEM;
}
module_init(fault_init);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Faults put into a running guest, for Rekindle's fault experiment");
