/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copying of twin.c, for one kind of processor. twin.c includes it with
 *   NAME(x)            the name of x for this kind
 *   TARGET             what the compiler must know of it
 *   STREAM(dst, src)   a line to an aligned place, past the caches
 */

/* With a tally: counts what is left out. */
static inline TARGET struct way NAME(find)(const struct ends *e, uint64_t i, struct sl_tally *t)
{
	const struct sl_move *m = e->m;
	int dst_wide = m->flags & SL_DST_WIDE, src_wide = m->flags & SL_SRC_WIDE;
	uint64_t d = at(e->dst_index, dst_wide, i), s = at(e->src_index, src_wide, i);

	if (d < m->dst_places && s < m->src_places)
		return (struct way){e->dst + d * e->p->dst_stride, e->src + s * e->p->src_stride};
	if (t && (skips(e->dst_index, dst_wide, d) || skips(e->src_index, src_wide, s))) {
		t->skipped++;
	} else if (t) {
		t->bad++;
		t->first_bad = i < t->first_bad ? i : t->first_bad;
	}
	return (struct way){0, 0};
}

/* By steps that shrink, for a call of memcpy would wait for the stores of entries before. */
static inline TARGET void NAME(copy)(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	uint64_t i = 0;

	for (; i + LINE <= len; i += LINE)
		*(line *)(dst + i) = *(const line *)(src + i);
	for (; i + 16 <= len; i += 16)
		memcpy(dst + i, src + i, 16);
	for (; i + 4 <= len; i += 4)
		memcpy(dst + i, src + i, 4);
	for (; i < len; i++)
		dst[i] = src[i];
}

/* Whole lines past the caches; those that other entries share, through them. */
static inline TARGET void NAME(stream)(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	uint64_t i = -(uintptr_t)dst % LINE;

	i = i < len ? i : len;
	NAME(copy)(dst, src, i);
	for (; i + LINE <= len; i += LINE)
		STREAM(dst + i, src + i);
	NAME(copy)(dst + i, src + i, len - i);
}

/* A source is fetched into the second-level cache, which takes more misses at a time. */
static inline TARGET void NAME(fetch)(const struct way *w, uint64_t i)
{
	__builtin_prefetch(w->src + i, 0, 2);
	__builtin_prefetch(w->dst + i);
}

/*
 * Copies one entry and fetches another, a line of it for each line that is copied: fetched
 * at once, it would only wait for buffers. NULL: nothing to copy, or to fetch.
 */
static inline TARGET void NAME(step)(const struct way *now, const struct way *next, uint64_t len)
{
	uint64_t i = 0;

	if (now->dst && next->dst && len <= FETCH_MAX) {
		for (; i + LINE <= len; i += LINE) {
			NAME(fetch)(next, i);
			*(line *)(now->dst + i) = *(const line *)(now->src + i);
		}
		NAME(fetch)(next, len - 1);
		NAME(copy)(now->dst + i, now->src + i, len - i);
		return;
	}
	if (now->dst)
		memcpy(now->dst, now->src, len);
	for (; next->dst && len <= FETCH_MAX && i < len; i += LINE)
		NAME(fetch)(next, i);
}

static inline TARGET void NAME(step_past)(const struct way *now, const struct way *next,
					  uint64_t len)
{
	if (next->dst) { /* the ends, which are stored through the caches */
		__builtin_prefetch(next->dst);
		__builtin_prefetch(next->dst + len - 1);
		__builtin_prefetch(next->src, 0, 2);
	}
	if (now->dst)
		NAME(stream)(now->dst, now->src, len);
}

static TARGET void NAME(move)(const struct ends *e, uint64_t first, uint64_t end,
			      struct sl_tally *t)
{
	struct way ways[AHEAD];
	uint64_t len = e->p->entry;

	for (uint64_t i = 0; i < AHEAD && i < end - first; i++)
		ways[i] = NAME(find)(e, first + i, t);
	for (uint64_t i = first; i < end; i++) {
		struct way *slot = &ways[(i - first) % AHEAD], now = *slot;

		*slot = i + AHEAD < end ? NAME(find)(e, i + AHEAD, t) : (struct way){0, 0};
		if (e->past)
			NAME(step_past)(&now, slot, len);
		else
			NAME(step)(&now, slot, len);
	}
}

#undef NAME
#undef TARGET
#undef STREAM
