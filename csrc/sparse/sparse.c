/* SPDX-License-Identifier: Apache-2.0 */
#include "sparse.h"

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* home returns the group in which an entry is looked for first. Neighbours have different ones. */
INLINE uint32_t home(const struct sl_sparse_table *t, uint32_t entry)
{
	uint32_t q = (uint32_t)(((unsigned __int128)t->inverse * entry) >> 64);
	uint32_t turn = (uint32_t)(((uint64_t)(q * 0x9e3779b1u) * t->groups) >> 32);
	uint32_t g = entry - q * t->groups + turn;

	return g >= t->groups ? g - t->groups : g;
}

INLINE uint32_t next(const struct sl_sparse_table *t, uint32_t group)
{
	return group + 1 == t->groups ? 0 : group + 1;
}

/* The ways of a group that hold a tag, a bit each. */
INLINE uint32_t plain(const uint32_t *tags, uint32_t tag)
{
	uint32_t ways = 0;

	for (int i = 0; i < SL_SPARSE_WAYS; i++)
		ways |= (uint32_t)(tags[i] == tag) << i;
	return ways;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline uint32_t avx2(const uint32_t *tags, uint32_t tag)
{
	__m256i want = _mm256_set1_epi32((int)tag);
	__m256i low = _mm256_loadu_si256((const __m256i *)tags);
	__m256i high = _mm256_loadu_si256((const __m256i *)(tags + 8));

	low = _mm256_cmpeq_epi32(low, want);
	high = _mm256_cmpeq_epi32(high, want);
	return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low)) |
	       (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8;
}

__attribute__((target("avx512f"))) static inline uint32_t avx512(const uint32_t *tags, uint32_t tag)
{
	return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(tags), _mm512_set1_epi32((int)tag));
}
#endif

/* oldest returns the way that has not been used for longest; WAYS: all were, at this tick. */
INLINE int oldest(const uint16_t *stamps, uint16_t clock)
{
	int way = SL_SPARSE_WAYS;
	uint16_t age = 0;

	for (int i = 0; i < SL_SPARSE_WAYS; i++) {
		uint16_t a = (uint16_t)(clock - stamps[i]);

		way = a > age ? i : way;
		age = a > age ? a : age;
	}
	return way;
}

/* The set that a lookup works on. */
struct set {
	uint32_t *tags;
	uint16_t *stamps;
	uint8_t *beyond;
	uint16_t clock;
};

/*
 * place gives an entry that is nowhere a slot: an empty one, or the oldest of the first group that
 * has one which was not used at this tick. The groups before it count that somebody went past.
 */
static uint32_t place(const struct sl_sparse_table *t, struct set *s, uint32_t entry,
		      uint32_t first)
{
	uint32_t tried = 0, g = first;

	for (; tried < t->groups; tried++, g = next(t, g)) {
		uint32_t *tags = s->tags + g * SL_SPARSE_WAYS, empty = plain(tags, SL_SPARSE_NONE);
		int way = empty ? __builtin_ctz(empty)
				: oldest(s->stamps + g * SL_SPARSE_WAYS, s->clock);

		if (way == SL_SPARSE_WAYS)
			continue;
		if (!empty) /* who goes was past some groups itself */
			for (uint32_t h = home(t, tags[way]); h != g; h = next(t, h))
				if (s->beyond[h] != UINT8_MAX)
					s->beyond[h]--;
		tags[way] = entry;
		s->stamps[g * SL_SPARSE_WAYS + way] = s->clock;
		for (; first != g; first = next(t, first))
			if (s->beyond[first] != UINT8_MAX)
				s->beyond[first]++;
		return g * SL_SPARSE_WAYS + way;
	}
	return SL_SPARSE_NONE;
}

/* begin starts the next tick of a set. Behind the last one all entries are of one age. */
static struct set begin(const struct sl_sparse_table *t, uint32_t set)
{
	size_t groups = (size_t)set * t->groups, ways = groups * SL_SPARSE_WAYS;
	struct set s = {t->tags + ways, t->stamps + ways, t->beyond + groups, ++t->clocks[set]};

	if (!s.clock) {
		memset(s.stamps, 0, (size_t)t->groups * SL_SPARSE_WAYS * sizeof *s.stamps);
		s.clock = t->clocks[set] = 1;
	}
	return s;
}

/* from returns where an entry lies; NONE: 32 bits cannot say, so that no memory has it. */
INLINE uint32_t from(const struct sl_sparse_batch *b, const uint32_t *blocks, uint32_t entry)
{
	uint32_t block = blocks[entry >> b->shift];

	if (block > UINT32_MAX >> b->shift)
		return SL_SPARSE_NONE;
	return block << b->shift | (entry & ((1u << b->shift) - 1));
}

/* The lookup of one set; name is how a group is compared. */
#define LOOKUP(name, attributes)                                                                   \
	attributes static uint32_t lookup_##name(const struct sl_sparse_table *t,                  \
						 const struct sl_sparse_batch *b, uint32_t at,     \
						 struct sl_sparse_misses m)                        \
	{                                                                                          \
		struct set s = begin(t, b->sets[at]);                                              \
		uint32_t base = b->sets[at] * t->groups * SL_SPARSE_WAYS, count = 0;               \
		const uint32_t *blocks = b->blocks + b->starts[at];                                \
                                                                                                   \
		for (size_t i = (size_t)at * b->n, end = i + b->n; i < end; i++) {                 \
			uint32_t entry = b->entries[i], first, g, found, slot, tried = 0;          \
                                                                                                   \
			if (entry == SL_SPARSE_NONE) {                                             \
				b->slots[i] = SL_SPARSE_NONE;                                      \
				continue;                                                          \
			}                                                                          \
			g = first = home(t, entry);                                                \
			while (!(found = name(s.tags + g * SL_SPARSE_WAYS, entry)) &&              \
			       s.beyond[g] && ++tried < t->groups)                                 \
				g = next(t, g);                                                    \
			if (found) {                                                               \
				slot = g * SL_SPARSE_WAYS + (uint32_t)__builtin_ctz(found);        \
				s.stamps[slot] = s.clock;                                          \
				b->slots[i] = base + slot;                                         \
				continue;                                                          \
			}                                                                          \
			slot = place(t, &s, entry, first);                                         \
			b->slots[i] = m.slots[count] = base + slot;                                \
			m.from[count] = from(b, blocks, entry);                                    \
			m.place[count++] = (uint32_t)i;                                            \
		}                                                                                  \
		return count;                                                                      \
	}

LOOKUP(plain, )
#if defined(__x86_64__)
LOOKUP(avx2, __attribute__((target("avx2"))))
LOOKUP(avx512, __attribute__((target("avx512f"))))
#endif

typedef uint32_t lookup_one(const struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			    uint32_t at, struct sl_sparse_misses m);

static lookup_one *choose(int way)
{
#if defined(__x86_64__)
	int best = way == SL_SPARSE_BEST;

	if ((best || way == SL_SPARSE_AVX512) && __builtin_cpu_supports("avx512f"))
		return lookup_avx512;
	if ((best || way == SL_SPARSE_AVX2) && __builtin_cpu_supports("avx2"))
		return lookup_avx2;
#endif
	return way == SL_SPARSE_BEST || way == SL_SPARSE_PLAIN ? lookup_plain : NULL;
}

int sl_sparse_has(int way) { return choose(way) != NULL; }

/* fetch has the processor bring a set into its cache. */
static void fetch(const struct sl_sparse_table *t, uint32_t set)
{
	size_t ways = (size_t)t->groups * SL_SPARSE_WAYS;
	const char *tags = (const char *)(t->tags + set * ways);
	const char *stamps = (const char *)(t->stamps + set * ways);

	for (size_t i = 0; i < ways * sizeof *t->tags; i += 64)
		__builtin_prefetch(tags + i, 1);
	for (size_t i = 0; i < ways * sizeof *t->stamps; i += 64)
		__builtin_prefetch(stamps + i, 1);
}

/* behind returns 1 + the first entry that lies behind the blocks of its set; 0: none does. */
static size_t behind(const struct sl_sparse_batch *b)
{
	for (uint32_t at = 0; at < b->count; at++) {
		uint64_t end = (uint64_t)(b->starts[at + 1] - b->starts[at]) << b->shift;
		const uint32_t *entries = b->entries + (size_t)at * b->n;
		int bad = 0;

		for (uint32_t i = 0; i < b->n; i++)
			bad |= (entries[i] >= end) & (entries[i] != SL_SPARSE_NONE);
		for (uint32_t i = 0; bad && i < b->n; i++)
			if (entries[i] >= end && entries[i] != SL_SPARSE_NONE)
				return (size_t)at * b->n + i + 1;
	}
	return 0;
}

int64_t sl_sparse_lookup(struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			 const struct sl_sparse_misses *m, int way)
{
	struct sl_sparse_misses rest = *m;
	lookup_one *one = choose(way);
	size_t bad = behind(b);

	if (bad)
		return -(int64_t)bad;
	for (uint32_t at = 0; at < b->count; at++) {
		uint32_t got;

		if (at + 1 < b->count)
			fetch(t, b->sets[at + 1]);
		got = b->counts[at] = one(t, b, at, rest);
		rest.slots += got;
		rest.from += got;
		rest.place += got;
	}
	return rest.slots - m->slots;
}
