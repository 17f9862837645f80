/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that look entries of sparse attention up, as csrc/sparse does on the CPU, with the
 * same result to the bit: Table in csrc/sparse/sparse.go says how. sl_lookup_check refuses a batch
 * before anything has changed; sl_lookup_sets, launched behind it, looks it up. A block takes a set
 * at a time. Its threads find what is there in any order, half a warp for each entry, a thread for
 * each way of a group; then half a warp gives what is not there its slots, in the order of the
 * batch, on which they depend.
 */
#include "sparse.h"

#define WAYS SL_LOOKUP_WAYS
#define NONE SL_LOOKUP_NONE
#define MISSED (NONE - 1) /* no slot: a table has fewer than 2^31 */

/* A set, at the tick of a lookup. */
struct set {
	sl_u32 *tags;
	unsigned short *stamps;
	unsigned char *beyond;
	sl_u32 groups, clock;
};

/* home returns the group in which an entry is looked for first. */
SL_DEV sl_u32 home(const struct set *s, sl_u32 entry)
{
	return (sl_u32)((sl_u64)(entry * 0x9e3779b1u) * s->groups >> 32);
}

SL_DEV sl_u32 past(const struct set *s, sl_u32 group)
{
	return group + 1 == s->groups ? 0 : group + 1;
}

/* The way of a group that this thread looks at. */
SL_DEV sl_u32 way(sl_u32 group) { return group * WAYS + sl_tid() % WAYS; }

/* begin starts the next tick of a set. Behind the last one all entries are of one age. */
SL_DEV struct set begin(const struct sl_lookup *a, sl_u32 set)
{
	sl_u64 groups = (sl_u64)set * a->groups;
	struct set s = {(sl_u32 *)a->tags + groups * WAYS,
			(unsigned short *)a->stamps + groups * WAYS,
			(unsigned char *)a->beyond + groups, a->groups,
			(((unsigned short *)a->clocks)[set] + 1u) & 0xffff};

	if (!s.clock) {
		for (sl_u32 i = sl_tid(); i < a->groups * WAYS; i += sl_bdim())
			s.stamps[i] = 0;
		s.clock = 1;
		sl_barrier();
	}
	return s;
}

/* seek returns the slot, of its set, of an entry, given this thread's tag of its home. */
SL_DEV sl_u32 seek(const struct set *s, sl_u32 entry, sl_u32 tag)
{
	sl_u32 g = home(s, entry), tried = 0, found;

	while (!(found = sl_half_ballot(tag == entry))) {
		if (!s->beyond[g] || ++tried == s->groups)
			return NONE;
		g = past(s, g);
		tag = s->tags[way(g)];
	}
	return g * WAYS + sl_lowest(found);
}

/* count adds to what groups from one to another, without that, say has gone past them. */
SL_DEV void count(const struct set *s, sl_u32 g, sl_u32 to, sl_u32 by)
{
	for (; g != to; g = past(s, g))
		if (s->beyond[g] != 255)
			s->beyond[g] = (unsigned char)(s->beyond[g] + by);
}

/*
 * put gives an entry that is nowhere a slot: an empty one, or the oldest of the first group that
 * has one which was not used at this tick. There is one: a set has no fewer slots than a batch asks
 * for.
 */
SL_DEV sl_u32 put(const struct set *s, sl_u32 entry)
{
	sl_u32 first = home(s, entry), g = first;

	for (sl_u32 tried = 0; tried < s->groups; tried++, g = past(s, g)) {
		sl_u32 empty = sl_half_ballot(s->tags[way(g)] == NONE);
		sl_u32 age = (s->clock - s->stamps[way(g)]) & 0xffff;
		sl_u32 oldest = sl_half_max(age * WAYS + (WAYS - 1 - sl_tid() % WAYS));
		sl_u32 slot = g * WAYS + (empty ? sl_lowest(empty) : WAYS - 1 - oldest % WAYS);

		if (!empty && oldest < WAYS)
			continue;
		if (sl_tid() % WAYS == 0) {
			if (!empty) /* the entry that goes had gone past some groups itself */
				count(s, home(s, s->tags[slot]), g, ~0u);
			s->tags[slot] = entry;
			s->stamps[slot] = (unsigned short)s->clock;
			count(s, first, g, 1);
		}
		sl_half_barrier();
		return slot;
	}
	return NONE;
}

/* from returns where an entry lies; NONE: 32 bits cannot say. */
SL_DEV sl_u32 from(const sl_u32 *blocks, sl_u32 entry, sl_u32 shift)
{
	sl_u32 block = blocks[entry >> shift];

	if (block > NONE >> shift)
		return NONE;
	return block << shift | (entry & ((1u << shift) - 1));
}

/* hits finds the entries of a set that are there, and says of the others that they are MISSED. */
SL_DEV void hits(const struct set *s, const sl_u32 *entries, sl_u32 n, sl_u32 base, sl_u32 *slots)
{
	sl_u32 step = sl_bdim() / WAYS * SL_LOOKUP_AHEAD;

	SL_ROLL
	for (sl_u32 k = sl_tid() / WAYS * SL_LOOKUP_AHEAD; k < n; k += step) {
		sl_u32 entry[SL_LOOKUP_AHEAD], tag[SL_LOOKUP_AHEAD], slot;

		SL_UNROLL for (sl_u32 j = 0; j < SL_LOOKUP_AHEAD; j++) entry[j] =
		    k + j < n ? entries[k + j] : NONE;
		SL_UNROLL for (sl_u32 j = 0; j < SL_LOOKUP_AHEAD; j++) tag[j] =
		    s->tags[way(home(s, entry[j]))];
		SL_UNROLL for (sl_u32 j = 0; j < SL_LOOKUP_AHEAD; j++)
		{
			slot = entry[j] == NONE ? NONE : seek(s, entry[j], tag[j]);
			if (k + j >= n || sl_tid() % WAYS)
				continue;
			if (slot != NONE)
				s->stamps[slot] = (unsigned short)s->clock;
			if (entry[j] != NONE)
				slot = slot == NONE ? MISSED : base + slot;
			slots[k + j] = slot;
		}
	}
}

/* misses has half a warp give what is MISSED its slots, in the order of the batch: set i of it. */
SL_DEV sl_u32 misses(const struct sl_lookup *a, const struct set *s, sl_u32 i, sl_u32 base)
{
	const sl_u32 *blocks = (const sl_u32 *)a->blocks + ((const sl_u32 *)a->starts)[i];
	sl_u64 first = (sl_u64)i * a->n;
	const sl_u32 *entries = (const sl_u32 *)a->entries + first;
	sl_u32 *slots = (sl_u32 *)a->slots + first, missed = 0;

	SL_ROLL
	for (sl_u32 k = 0; k < a->n; k += WAYS) {
		sl_u32 mine = k + sl_tid() < a->n ? slots[k + sl_tid()] : NONE;
		sl_u32 those = sl_half_ballot(mine == MISSED);

		SL_ROLL
		for (; those; those &= those - 1) {
			sl_u32 at = k + sl_lowest(those), entry = entries[at];
			sl_u32 slot = seek(s, entry, s->tags[way(home(s, entry))]);
			sl_u32 anew = slot == NONE; /* else the batch has asked for it twice */

			if (anew)
				slot = put(s, entry);
			if (sl_tid() == 0) {
				slots[at] = base + slot;
				if (anew) {
					((sl_u32 *)a->miss_slots)[first + missed] = base + slot;
					((sl_u32 *)a->miss_from)[first + missed] =
					    from(blocks, entry, a->shift);
					((sl_u32 *)a->miss_at)[first + missed] = (sl_u32)first + at;
				}
			}
			missed += anew;
		}
	}
	return missed;
}

/* Holds all that the batch names against what there is. Threads do not speak with one another. */
SL_KERNEL(SL_LOOKUP_THREADS) sl_lookup_check(struct sl_lookup a)
{
	struct sl_lookup_bad *bad = (struct sl_lookup_bad *)a.bad;
	const sl_u32 *sets = (const sl_u32 *)a.sets, *starts = (const sl_u32 *)a.starts;

	SL_ROLL
	for (sl_u32 i = sl_bid(); i < a.count; i += sl_gdim()) {
		sl_u64 first = (sl_u64)i * a.n;
		sl_u64 room = (sl_u64)(starts[i + 1] - starts[i]) << a.shift;
		sl_u32 most = room < NONE ? (sl_u32)room : NONE;

		if (sl_tid() == 0 && (sets[i] >= a.all || (i && sets[i - 1] >= sets[i]) ||
				      starts[i] > starts[i + 1] || starts[i + 1] > a.blocks_n))
			sl_least(&bad->set, i);
		for (sl_u32 k = sl_tid(); k < a.n; k += sl_bdim())
			if (((const sl_u32 *)a.entries)[first + k] + 1 > most) /* NONE + 1 is 0 */
				sl_least(&bad->entry, first + k);
	}
}

SL_KERNEL(SL_LOOKUP_THREADS) sl_lookup_sets(struct sl_lookup a)
{
	const struct sl_lookup_bad *bad = (const struct sl_lookup_bad *)a.bad;

	if (bad->set != SL_SKIP || bad->entry != SL_SKIP)
		return;
	SL_ROLL
	for (sl_u32 i = sl_bid(); i < a.count; i += sl_gdim()) {
		sl_u32 set = ((const sl_u32 *)a.sets)[i], base = set * a.groups * WAYS;
		sl_u64 first = (sl_u64)i * a.n;
		struct set s = begin(&a, set);

		hits(&s, (const sl_u32 *)a.entries + first, a.n, base, (sl_u32 *)a.slots + first);
		sl_barrier();
		if (sl_tid() >= WAYS)
			continue;
		sl_u32 missed = misses(&a, &s, i, base);
		if (sl_tid() == 0) {
			((sl_u32 *)a.counts)[i] = missed;
			((unsigned short *)a.clocks)[set] = (unsigned short)s.clock;
		}
	}
}
