/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that UCX allocates, and what peers need to map it. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Atomic uint32_t *sl_ucx_word(struct sl_ucx_context *c, uint32_t key)
{
	return c->words && key < SL_UCX_WORDS ? (_Atomic uint32_t *)c->words->base + key : NULL;
}

/*
 * Our number stands behind what UCX reads: it gives two allocations the same key where the second
 * has the descriptor and the address that the first had, and peers keep what they have mapped.
 */
static int pack(struct sl_ucx_allocation *a)
{
	uint64_t number = atomic_fetch_add(&a->context->nonce, 1);
	void *packed;
	size_t len;
	ucs_status_t status = sl_ucx.ucp_rkey_pack(a->context->handle, a->handle, &packed, &len);
	int fits;

	if (status != UCS_OK)
		return sl_ucx_errno(status);
	fits = len <= sizeof(a->rkey) - sizeof(number);
	if (fits) {
		memcpy(a->rkey, packed, len);
		memcpy(a->rkey + len, &number, sizeof(number));
	}
	a->rkey_len = (uint32_t)(len + sizeof(number));
	sl_ucx.ucp_rkey_buffer_release(packed);
	return fits ? 0 : -ENOTSUP;
}

int sl_ucx_allocate(struct sl_ucx_context *c, uint64_t len, struct sl_ucx_allocation **out)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS |
			      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
		.length = (len + page - 1) / page * page,
		.flags = UCP_MEM_MAP_ALLOCATE | UCP_MEM_MAP_NONBLOCK,
		.memory_type = UCS_MEMORY_TYPE_HOST,
	};
	ucp_mem_attr_t attr = {.field_mask =
				   UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};
	struct sl_ucx_allocation *a = len <= INT64_MAX - page ? calloc(1, sizeof(*a)) : NULL;
	int rc;

	if (!a)
		return -ENOMEM;
	a->context = c;
	a->len = len;
	pthread_mutex_lock(&c->lock); /* all the time: the context stays as long */
	rc = c->closed ? -EBADF : sl_ucx_errno(sl_ucx.ucp_mem_map(c->handle, &params, &a->handle));
	if (rc == 0) {
		rc = sl_ucx_errno(sl_ucx.ucp_mem_query(a->handle, &attr));
		a->base = attr.address;
		a->mapped = attr.length;
		if (rc == 0)
			rc = pack(a);
		if (rc != 0)
			sl_ucx.ucp_mem_unmap(c->handle, a->handle);
	}
	if (rc == 0) {
		a->next = c->allocations;
		c->allocations = a;
		*out = a;
	}
	pthread_mutex_unlock(&c->lock);
	if (rc != 0)
		free(a);
	return rc;
}

void *sl_ucx_allocated(struct sl_ucx_allocation *a)
{
	return a->base;
}

/*
 * Gives back the pages that fences have put there: UCX may have taken the allocation from SysV, and
 * then unmaps pages of that alone. The addresses stay until UCX has unmapped what it does, so that
 * nothing else comes there before.
 */
static void drop_fresh(const struct sl_ucx_allocation *a)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;

	for (uint32_t i = 0; i < a->fresh_len; i++)
		(void)mmap((uint8_t *)a->base + a->fresh[i].from,
			   a->fresh[i].to - a->fresh[i].from, PROT_NONE, flags, -1, 0);
}

void sl_ucx_release(struct sl_ucx_allocation *a)
{
	struct sl_ucx_context *c = a->context;

	pthread_mutex_lock(&c->lock);
	for (struct sl_ucx_allocation **p = &c->allocations; *p; p = &(*p)->next) {
		if (*p == a) {
			*p = a->next;
			break;
		}
	}
	drop_fresh(a);
	sl_ucx.ucp_mem_unmap(c->handle, a->handle);
	free(a->fresh);
	free(a);
	if (c->closed && !c->allocations)
		sl_ucx.ucp_cleanup(c->handle);
	pthread_mutex_unlock(&c->lock);
}

/* Whether peers that map the allocation see the pages of this memory. */
int sl_ucx_may_export(const struct sl_ucx_memory *m)
{
	uint64_t from, to;

	if (!m->in)
		return 0;
	from = (uint64_t)(m->base - m->in->base);
	to = from + m->len;
	for (uint32_t i = 0; i < m->in->fresh_len; i++) {
		if (from < m->in->fresh[i].to && m->in->fresh[i].from < to)
			return 0;
	}
	return 1;
}

int sl_ucx_export(struct sl_ucx_context *c, uint32_t key, struct sl_ucx_export *out)
{
	_Atomic uint32_t *word;
	struct sl_ucx_memory *m;
	int may;

	memset(out, 0, sizeof(*out));
	pthread_mutex_lock(&c->lock);
	word = sl_ucx_word(c, key);
	m = sl_ucx_find(c, key);
	may = m && word && sl_ucx_may_export(m);
	out->base = m ? (uint64_t)(uintptr_t)m->base : 0;
	if (may) {
		m->exported = 1;
		out->generation = atomic_load(word);
		out->rkey_len = m->in->rkey_len;
		memcpy(out->rkey, m->in->rkey, m->in->rkey_len);
	}
	pthread_mutex_unlock(&c->lock);
	return may;
}

int sl_ucx_words(struct sl_ucx_context *c, struct sl_ucx_export *out)
{
	int there;

	memset(out, 0, sizeof(*out));
	pthread_mutex_lock(&c->lock);
	there = c->words != NULL;
	if (there) {
		out->base = (uint64_t)(uintptr_t)c->words->base;
		out->rkey_len = c->words->rkey_len;
		memcpy(out->rkey, c->words->rkey, c->words->rkey_len);
	}
	pthread_mutex_unlock(&c->lock);
	return there;
}
