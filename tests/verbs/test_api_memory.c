/* Regions and windows: what can be registered, and what a key opens. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "verbs/helper_api.h"

#define PAGE 4096u

static void memory_that_is_not_mapped_can_not_be_registered(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	uint8_t *pages = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(pages + 2 * PAGE, PAGE);
	assert_null(ibv_reg_mr(pd, pages, 4 * PAGE, IBV_ACCESS_LOCAL_WRITE));
	assert_int_equal(errno, EFAULT);
	struct ibv_mr *mr = ibv_reg_mr(pd, pages, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE);
	assert_non_null(mr);
	ibv_dereg_mr(mr);
	/* The hole may be somebody else's by now. */
	munmap(pages, 2 * PAGE);
	munmap(pages + 3 * PAGE, PAGE);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
}

static void read_only_memory_can_be_read_but_not_written(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	void *page = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_null(ibv_reg_mr(pd, page, PAGE, IBV_ACCESS_LOCAL_WRITE));
	assert_int_equal(errno, EFAULT);
	struct ibv_mr *mr = ibv_reg_mr(pd, page, PAGE, IBV_ACCESS_REMOTE_READ);
	assert_non_null(mr);
	ibv_dereg_mr(mr);
	munmap(page, PAGE);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
}

static void remote_write_needs_local_write(void **state)
{
	(void)state;
	static uint8_t memory[64];
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	assert_null(ibv_reg_mr(pd, memory, 64, IBV_ACCESS_REMOTE_WRITE));
	assert_int_equal(errno, EINVAL);
	assert_null(ibv_reg_mr(pd, memory, 64, IBV_ACCESS_REMOTE_ATOMIC));
	assert_null(ibv_reg_mr(pd, memory, 64, 1 << 15));
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
}

static void keys_differ_and_do_not_follow_each_other(void **state)
{
	(void)state;
	enum { COUNT = 64 };
	static uint8_t memory[64];
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_mr *mr[COUNT];
	int steps = 0;
	for (int i = 0; i < COUNT; i++) {
		mr[i] = ibv_reg_mr(pd, memory, 64, 0);
		assert_non_null(mr[i]);
		for (int j = 0; j < i; j++)
			assert_int_not_equal(mr[i]->rkey, mr[j]->rkey);
		steps += i > 0 && mr[i]->rkey - mr[i - 1]->rkey <= 0x100;
	}
	assert_true(steps < COUNT / 4);
	for (int i = 0; i < COUNT; i++)
		ibv_dereg_mr(mr[i]);
	ibv_dealloc_pd(pd);
	ibv_close_device(context);
}

static void expect_write(struct pair *p, uint64_t addr, uint32_t rkey, enum ibv_wc_status status)
{
	struct ibv_sge sge = { (uintptr_t)p->a.data, 16, p->a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { addr, rkey } }, *bad;
	assert_int_equal(ibv_post_send(p->a.qp, &wr, &bad), 0);
	assert_int_equal(next_wc(p->a.cq).status, status);
}

static void a_region_answers_to_the_address_it_was_given(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mr *mr = ibv_reg_mr_iova(p.b.pd, p.b.data + 100, 1000, 0x7000, SIDE_ACCESS);
	assert_non_null(mr);
	expect_write(&p, 0x7000, mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(p.b.data + 100, p.a.data, 16);
	expect_write(&p, (uintptr_t)p.b.data + 100, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	ibv_dereg_mr(mr);
	pair_close(&p);
}

static void a_zero_based_region_begins_at_zero(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, p.b.data, 1000, SIDE_ACCESS | IBV_ACCESS_ZERO_BASED);
	expect_write(&p, 8, mr->rkey, IBV_WC_SUCCESS);
	assert_memory_equal(p.b.data + 8, p.a.data, 16);
	ibv_dereg_mr(mr);
	pair_close(&p);
}

static void a_deregistered_key_opens_nothing(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, p.b.data, 1000, SIDE_ACCESS);
	uint32_t rkey = mr->rkey;
	expect_write(&p, (uintptr_t)p.b.data, rkey, IBV_WC_SUCCESS);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	expect_write(&p, (uintptr_t)p.b.data, rkey, IBV_WC_REM_ACCESS_ERR);
	pair_close(&p);
}

static void a_region_registered_anew_has_its_new_rights_and_place(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, p.b.data, 1000, SIDE_ACCESS);
	assert_int_equal(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, p.b.data + 5000, 1000, 0), 0);
	expect_write(&p, (uintptr_t)p.b.data + 5000, mr->rkey, IBV_WC_SUCCESS);
	assert_int_equal(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_READ), 0);
	expect_write(&p, (uintptr_t)p.b.data + 5000, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	ibv_dereg_mr(mr);
	pair_close(&p);
}

static void the_null_region_reads_as_zeros_and_swallows_writes(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mr *null = ibv_alloc_null_mr(p.a.pd);
	assert_non_null(null);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 10000, .remote = &p.b, .lkey = null->lkey });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	for (int i = 0; i < 10000; i++)
		assert_int_equal(p.b.data[i], 0);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = 10000, .remote = &p.b, .remote_offset = 20000, .lkey = null->lkey });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	assert_int_equal(p.a.data[0], 0xaa);
	ibv_dereg_mr(null);
	pair_close(&p);
}

static void an_on_demand_region_of_missing_pages_is_an_error_not_a_crash(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	uint8_t *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(p.b.pd, pages, 2 * PAGE, SIDE_ACCESS | IBV_ACCESS_ON_DEMAND);
	assert_non_null(mr);
	expect_write(&p, (uintptr_t)pages + PAGE, mr->rkey, IBV_WC_SUCCESS);
	/* Gone, and no hole that another thread's mapping could fill. */
	assert_ptr_equal(mmap(pages + PAGE, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), pages + PAGE);
	expect_write(&p, (uintptr_t)pages + PAGE, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	ibv_dereg_mr(mr);
	munmap(pages, 2 * PAGE);
	pair_close(&p);
}

/* Containers may refuse process_vm_*: then on-demand regions must work all the same. */
static bool refuse_process_vm(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(code[0]), code };
	return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static void on_demand_regions_work_without_process_vm(void **state)
{
	int status;
	if (SANITIZED)
		skip();
	pid_t pid = fork();
	if (pid == 0) {
		if (refuse_process_vm())
			an_on_demand_region_of_missing_pages_is_an_error_not_a_crash(state);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void a_region_with_a_window_can_not_be_deregistered(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = { .mr = p.b.mr, .addr = (uintptr_t)p.b.data + 64, .length = 100,
		.mw_access_flags = IBV_ACCESS_REMOTE_WRITE } };
	assert_int_equal(ibv_bind_mw(p.b.qp, mw, &bind), 0);
	struct ibv_wc wc = next_wc(p.b.cq);
	assert_int_equal(wc.status, IBV_WC_SUCCESS);
	assert_int_equal(wc.opcode, IBV_WC_BIND_MW);
	assert_int_equal(ibv_dereg_mr(p.b.mr), EBUSY);
	expect_write(&p, (uintptr_t)p.b.data + 64, mw->rkey, IBV_WC_SUCCESS);
	expect_write(&p, (uintptr_t)p.b.data + 63, mw->rkey, IBV_WC_REM_ACCESS_ERR);
	assert_int_equal(ibv_dealloc_mw(mw), 0);
	pair_close(&p);
}

static void a_type_1_window_bound_anew_has_a_new_key(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_mw *mw = ibv_alloc_mw(p.b.pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .bind_info = { .mr = p.b.mr, .addr = (uintptr_t)p.b.data, .length = 100, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE } };
	assert_int_equal(ibv_bind_mw(p.b.qp, mw, &bind), 0);
	uint32_t first = mw->rkey;
	assert_int_equal(ibv_bind_mw(p.b.qp, mw, &bind), 0);
	assert_int_not_equal(first, mw->rkey);
	expect_write(&p, (uintptr_t)p.b.data, mw->rkey, IBV_WC_SUCCESS);
	expect_write(&p, (uintptr_t)p.b.data, first, IBV_WC_REM_ACCESS_ERR);
	ibv_dealloc_mw(mw);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(memory_that_is_not_mapped_can_not_be_registered),
		cmocka_unit_test(read_only_memory_can_be_read_but_not_written),
		cmocka_unit_test(remote_write_needs_local_write),
		cmocka_unit_test(keys_differ_and_do_not_follow_each_other),
		cmocka_unit_test(a_region_answers_to_the_address_it_was_given),
		cmocka_unit_test(a_zero_based_region_begins_at_zero),
		cmocka_unit_test(a_deregistered_key_opens_nothing),
		cmocka_unit_test(a_region_registered_anew_has_its_new_rights_and_place),
		cmocka_unit_test(the_null_region_reads_as_zeros_and_swallows_writes),
		cmocka_unit_test(an_on_demand_region_of_missing_pages_is_an_error_not_a_crash),
		cmocka_unit_test(on_demand_regions_work_without_process_vm),
		cmocka_unit_test(a_region_with_a_window_can_not_be_deregistered),
		cmocka_unit_test(a_type_1_window_bound_anew_has_a_new_key),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
