/* SPDX-License-Identifier: Apache-2.0 */
/* Where tests have a thread stand, as if it had been stopped there. */
#include "worker.h"

#include <unistd.h>

uint32_t sl_ucx_sends(struct sl_ucx_conn *n)
{
	uint32_t sends;

	sl_ucx_lock(n->worker);
	sends = n->sends;
	sl_ucx_unlock(n->worker);
	return sends;
}

void sl_ucx_stand(struct sl_ucx_spots *s, int32_t spot)
{
	int32_t wanted = spot;
	char byte = 1;

	if (!__atomic_compare_exchange_n(&s->spot, &wanted, SL_UCX_AT_NONE, 0, __ATOMIC_SEQ_CST,
					 __ATOMIC_SEQ_CST))
		return;
	if (write(s->came, &byte, 1) == 1)
		(void)!read(s->leave, &byte, 1);
}
