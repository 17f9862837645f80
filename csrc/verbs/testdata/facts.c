/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints what abi.h claims, or with -DREAL what libibverbs' own headers say: sizes, offsets and
 * values, a line each. abi_test.go makes the list of all that is declared, and names its file as
 * DECLARED. With -DREAL it does not compile unless every prototype in calls.h is libibverbs'.
 */
#ifdef REAL
#include <infiniband/verbs.h>
#undef ibv_query_port /* the function, which has another struct */
#else
#include "abi.h"
#endif
#include "calls.h"

#include <stdio.h>

#ifdef REAL
#define SAME(version, ret, name, args)                                                             \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&name), ret(*) args),               \
		       #name " has another prototype");
SL_VERBS_CALLS(SAME)
SL_VERBS_OPTIONAL_CALLS(SAME)
#endif

#define VALUE(v) printf("%s = %lld\n", #v, (long long)(v));
#define SIZE(t) printf("sizeof %s = %zu\n", #t, sizeof(t));
#define FIELD(t, f)                                                                                \
	printf("%s.%s at %zu, %zu bytes\n", #t, #f, offsetof(t, f), sizeof(((t *)0)->f));

int main(void)
{
#include DECLARED
	return 0;
}
