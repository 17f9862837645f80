/* SPDX-License-Identifier: Apache-2.0 */
#include "sparse.h"

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#define HOME 0x9e3779b1u /* 2^32 by the golden ratio */

/* home returns the group in which an entry is looked for first. Neighbours are spread evenly. */
INLINE uint32_t home(const struct sl_sparse_table *t, uint32_t entry)
{
	return (uint32_t)(((uint64_t)(entry * HOME) * t->groups) >> 32);
}

INLINE uint32_t next(const struct sl_sparse_table *t, uint32_t group)
{
	return group + 1 == t->groups ? 0 : group + 1;
}

/* What instructions of the processor do in their way. */
struct way {
	/* The ways of a group that hold a tag, a bit each. */
	uint32_t (*with)(const uint32_t *tags, uint32_t tag);
	/* The way of a group that has not been used for longest; WAYS: all were, at this tick. */
	uint32_t (*oldest)(const uint16_t *stamps, uint16_t clock);
	/* Stamps ways of a group. */
	void (*stamp)(uint16_t *stamps, uint32_t ways, uint16_t clock);
	/* Writes the first slot of each entry's home, counted from base on. */
	void (*homes)(const struct sl_sparse_table *t, const uint32_t *entries, uint32_t n,
		      uint32_t base, uint32_t *slots);
};

static inline uint32_t with_plain(const uint32_t *tags, uint32_t tag)
{
	uint32_t ways = 0;

	for (int i = 0; i < SL_SPARSE_WAYS; i++)
		ways |= (uint32_t)(tags[i] == tag) << i;
	return ways;
}

static inline uint32_t oldest_plain(const uint16_t *stamps, uint16_t clock)
{
	uint32_t way = SL_SPARSE_WAYS;
	uint16_t age = 0;

	for (uint32_t i = 0; i < SL_SPARSE_WAYS; i++) {
		uint16_t a = (uint16_t)(clock - stamps[i]);

		way = a > age ? i : way;
		age = a > age ? a : age;
	}
	return way;
}

static inline void stamp_plain(uint16_t *stamps, uint32_t ways, uint16_t clock)
{
	for (; ways; ways &= ways - 1)
		stamps[__builtin_ctz(ways)] = clock;
}

static inline void homes_plain(const struct sl_sparse_table *t, const uint32_t *entries, uint32_t n,
			       uint32_t base, uint32_t *slots)
{
	for (uint32_t i = 0; i < n; i++)
		slots[i] = base + home(t, entries[i]) * SL_SPARSE_WAYS;
}

static const struct way way_plain = {with_plain, oldest_plain, stamp_plain, homes_plain};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

AVX2 static inline uint32_t with_avx2(const uint32_t *tags, uint32_t tag)
{
	__m256i want = _mm256_set1_epi32((int)tag);
	__m256i low = _mm256_loadu_si256((const __m256i *)tags);
	__m256i high = _mm256_loadu_si256((const __m256i *)(tags + 8));

	low = _mm256_cmpeq_epi32(low, want);
	high = _mm256_cmpeq_epi32(high, want);
	return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low)) |
	       (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8;
}

/* An instruction finds the least of eight, and which it is: the least of -1 - age. */
AVX2 static inline uint32_t oldest_avx2(const uint16_t *stamps, uint16_t clock)
{
	__m128i after = _mm_set1_epi16((short)(clock + 1));
	__m128i first = _mm_loadu_si128((const __m128i *)stamps);
	__m128i second = _mm_loadu_si128((const __m128i *)(stamps + 8));
	uint32_t low = (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_sub_epi16(first, after)));
	uint32_t high = (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_sub_epi16(second, after)));
	uint32_t least = (uint16_t)high < (uint16_t)low ? high + (8 << 16) : low;

	return (uint16_t)least == UINT16_MAX ? SL_SPARSE_WAYS : least >> 16;
}

AVX2 static inline void stamp_avx2(uint16_t *stamps, uint32_t ways, uint16_t clock)
{
	const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048,
					       4096, 8192, 16384, INT16_MIN);
	__m256i on = _mm256_and_si256(_mm256_set1_epi16((short)ways), bits);
	__m256i old = _mm256_loadu_si256((const __m256i *)stamps);
	__m256i new = _mm256_set1_epi16((short)clock);

	new = _mm256_blendv_epi8(old, new, _mm256_cmpeq_epi16(on, bits));
	_mm256_storeu_si256((__m256i *)stamps, new);
}

AVX2 static inline void homes_avx2(const struct sl_sparse_table *t, const uint32_t *entries,
				   uint32_t n, uint32_t base, uint32_t *slots)
{
	const __m256i turn = _mm256_set1_epi32((int)HOME), first = _mm256_set1_epi32((int)base);
	const __m256i groups = _mm256_set1_epi64x(t->groups);
	uint32_t i = 0;

	for (; n - i >= 8; i += 8) {
		__m256i e = _mm256_loadu_si256((const __m256i *)(entries + i)), even, odd;

		e = _mm256_mullo_epi32(e, turn);
		even = _mm256_srli_epi64(_mm256_mul_epu32(e, groups), 32);
		odd = _mm256_mul_epu32(_mm256_srli_epi64(e, 32), groups);
		e = _mm256_slli_epi32(_mm256_blend_epi32(even, odd, 0xaa), 4); /* WAYS */
		_mm256_storeu_si256((__m256i *)(slots + i), _mm256_add_epi32(e, first));
	}
	homes_plain(t, entries + i, n - i, base, slots + i);
}

static const struct way way_avx2 = {with_avx2, oldest_avx2, stamp_avx2, homes_avx2};

AVX512 static inline uint32_t with_avx512(const uint32_t *tags, uint32_t tag)
{
	return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(tags), _mm512_set1_epi32((int)tag));
}

static const struct way way_avx512 = {with_avx512, oldest_avx2, stamp_avx2, homes_avx2};
#endif

/* A set, at the tick of a lookup. */
struct set {
	uint32_t *tags;
	uint16_t *stamps;
	uint8_t *beyond;
	uint16_t clock;
};

INLINE struct set at(const struct sl_sparse_table *t, uint32_t set)
{
	size_t groups = (size_t)set * t->groups, ways = groups * SL_SPARSE_WAYS;

	return (struct set){t->tags + ways, t->stamps + ways, t->beyond + groups, t->clocks[set]};
}

/* begin starts the next tick of a set. Behind the last one all entries are of one age. */
INLINE struct set begin(const struct sl_sparse_table *t, uint32_t set)
{
	if (!++t->clocks[set]) {
		memset(at(t, set).stamps, 0,
		       (size_t)t->groups * SL_SPARSE_WAYS * sizeof *t->stamps);
		t->clocks[set] = 1;
	}
	return at(t, set);
}

/* find returns the slot, of its set, in which an entry lies; NONE: in none. */
INLINE uint32_t find(const struct sl_sparse_table *t, const struct set *s, uint32_t entry,
		     const struct way *way)
{
	uint32_t g = home(t, entry), tried = 0, found;

	while (!(found = way->with(s->tags + g * SL_SPARSE_WAYS, entry))) {
		if (!s->beyond[g] || ++tried == t->groups)
			return SL_SPARSE_NONE;
		g = next(t, g);
	}
	return g * SL_SPARSE_WAYS + (uint32_t)__builtin_ctz(found);
}

/*
 * place gives an entry that is nowhere a slot: an empty one, or the oldest of the first group that
 * has one which was not used at this tick. The groups before it count that an entry went past.
 */
INLINE uint32_t place(const struct sl_sparse_table *t, struct set *s, uint32_t entry,
		      const struct way *way)
{
	uint32_t first = home(t, entry), g = first;

	for (uint32_t tried = 0; tried < t->groups; tried++, g = next(t, g)) {
		uint32_t *tags = s->tags + g * SL_SPARSE_WAYS;
		uint32_t empty = way->with(tags, SL_SPARSE_NONE), at;

		at = empty ? (uint32_t)__builtin_ctz(empty)
			   : way->oldest(s->stamps + g * SL_SPARSE_WAYS, s->clock);
		if (at == SL_SPARSE_WAYS)
			continue;
		if (!empty) /* the entry that goes had gone past some groups itself */
			for (uint32_t h = home(t, tags[at]); h != g; h = next(t, h))
				if (s->beyond[h] != UINT8_MAX)
					s->beyond[h]--;
		tags[at] = entry;
		s->stamps[g * SL_SPARSE_WAYS + at] = s->clock;
		for (; first != g; first = next(t, first))
			if (s->beyond[first] != UINT8_MAX)
				s->beyond[first]++;
		return g * SL_SPARSE_WAYS + at;
	}
	return SL_SPARSE_NONE;
}

/* from returns where an entry lies; NONE: 32 bits cannot say, so that no memory has it. */
INLINE uint32_t from(const struct sl_sparse_batch *b, const uint32_t *blocks, uint32_t entry)
{
	uint32_t block = blocks[entry >> b->shift];

	if (block > UINT32_MAX >> b->shift)
		return SL_SPARSE_NONE;
	return block << b->shift | (entry & ((1u << b->shift) - 1));
}

/* fetch has the processor bring some groups of a set into its cache. */
INLINE void fetch(const struct set *s, uint32_t from, uint32_t to)
{
	for (uint32_t g = from; g < to; g++) {
		__builtin_prefetch(s->tags + g * SL_SPARSE_WAYS, 1);
		__builtin_prefetch(s->stamps + g * SL_SPARSE_WAYS, 1);
	}
}

/*
 * hits finds the entries of a set that lie in their homes. It lists the others, and has the ways
 * that it found in used; whether it found an entry decides no branch. Every few entries it fetches
 * a part of the next set: all at once, the fetches would wait for each other.
 */
INLINE uint32_t hits(const struct sl_sparse_table *t, const uint32_t *entries, uint32_t n,
		     uint32_t base, const struct set *ahead, uint32_t *slots, uint32_t *others,
		     uint16_t *used, const struct way *way)
{
	uint32_t groups = t->groups, each = groups / (n / 16 + 1) + 1, fetched = 0, count = 0;
	const uint32_t *tags = t->tags;

	way->homes(t, entries, n, base, slots);
	for (uint32_t i = 0, end; i < n; i = end) {
		end = n - i < 16 ? n : i + 16;
		for (; i < end; i++) {
			uint32_t entry = entries[i], first = slots[i], found;

			found = way->with(tags + first, entry);
			if (entry == SL_SPARSE_NONE) {
				slots[i] = SL_SPARSE_NONE;
				continue;
			}
			slots[i] = first + (uint32_t)__builtin_ctz(found | 1u << SL_SPARSE_WAYS);
			used[(first - base) / SL_SPARSE_WAYS] |= (uint16_t)found;
			others[count] = i;
			count += !found;
		}
		fetch(ahead, fetched, groups - fetched < each ? groups : fetched + each);
		fetched = groups - fetched < each ? groups : fetched + each;
	}
	return count;
}

/*
 * lookup_set looks up set i of a batch: first all that is there, so that none of it goes for what
 * is not.
 */
INLINE uint32_t lookup_set(const struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			   uint32_t i, const struct sl_sparse_misses *m, const struct way *way)
{
	struct set s = begin(t, b->sets[i]), ahead = i + 1 < b->count ? at(t, b->sets[i + 1]) : s;
	uint32_t base = b->sets[i] * t->groups * SL_SPARSE_WAYS, n = b->n, count = 0, missed = 0;
	const uint32_t *entries = b->entries + (size_t)i * n, *blocks = b->blocks + b->starts[i];
	uint32_t *slots = b->slots + (size_t)i * n, others;

	others = hits(t, entries, n, base, &ahead, slots, m->place, m->used, way);
	for (uint32_t g = 0; g < t->groups; g++) {
		if (!m->used[g])
			continue;
		way->stamp(s.stamps + g * SL_SPARSE_WAYS, m->used[g], s.clock);
		m->used[g] = 0;
	}
	for (uint32_t j = 0; j < others; j++) { /* some lie behind their homes */
		uint32_t k = m->place[j], slot = SL_SPARSE_NONE;

		if (s.beyond[home(t, entries[k])])
			slot = find(t, &s, entries[k], way);
		if (slot == SL_SPARSE_NONE) {
			__builtin_prefetch(blocks + (entries[k] >> b->shift));
			m->place[missed++] = k;
			continue;
		}
		s.stamps[slot] = s.clock;
		slots[k] = base + slot;
	}
	for (uint32_t j = 0; j < missed; j++) {
		uint32_t k = m->place[j], slot = find(t, &s, entries[k], way);

		if (slot == SL_SPARSE_NONE) { /* else the batch has asked for it twice */
			slot = place(t, &s, entries[k], way);
			m->slots[count] = base + slot;
			m->from[count] = from(b, blocks, entries[k]);
			m->place[count++] = i * n + k;
		}
		slots[k] = base + slot;
	}
	return count;
}

typedef uint32_t lookup(const struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			uint32_t i, const struct sl_sparse_misses *m);

static uint32_t lookup_plain(const struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			     uint32_t i, const struct sl_sparse_misses *m)
{
	return lookup_set(t, b, i, m, &way_plain);
}

#if defined(__x86_64__)
AVX2 static uint32_t lookup_avx2(const struct sl_sparse_table *t, const struct sl_sparse_batch *b,
				 uint32_t i, const struct sl_sparse_misses *m)
{
	return lookup_set(t, b, i, m, &way_avx2);
}

AVX512 static uint32_t lookup_avx512(const struct sl_sparse_table *t,
				     const struct sl_sparse_batch *b, uint32_t i,
				     const struct sl_sparse_misses *m)
{
	return lookup_set(t, b, i, m, &way_avx512);
}
#endif

static lookup *choose(int way)
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

/* behind returns 1 + the first entry that lies behind the blocks of its set; 0: none does. */
static size_t behind(const struct sl_sparse_batch *b)
{
	for (uint32_t at = 0; at < b->count; at++) {
		uint64_t end = (uint64_t)(b->starts[at + 1] - b->starts[at]) << b->shift;
		uint32_t most = end < UINT32_MAX ? (uint32_t)end : UINT32_MAX;
		const uint32_t *entries = b->entries + (size_t)at * b->n;
		int bad = 0;

		for (uint32_t i = 0; i < b->n; i++)
			bad |= entries[i] + 1 > most; /* NONE + 1 is 0 */
		for (uint32_t i = 0; bad && i < b->n; i++)
			if (entries[i] + 1 > most)
				return (size_t)at * b->n + i + 1;
	}
	return 0;
}

int64_t sl_sparse_lookup(struct sl_sparse_table *t, const struct sl_sparse_batch *b,
			 const struct sl_sparse_misses *m, int way)
{
	struct sl_sparse_misses rest = *m;
	lookup *one = choose(way);
	size_t bad = behind(b);

	if (bad)
		return -(int64_t)bad;
	for (uint32_t i = 0; i < b->count; i++) {
		uint32_t got = b->counts[i] = one(t, b, i, &rest);

		rest.slots += got;
		rest.from += got;
		rest.place += got;
	}
	return rest.slots - m->slots;
}
