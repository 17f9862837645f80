// SPDX-License-Identifier: Apache-2.0

package weights

// state is the progress of an item.
type state uint8

const (
	waiting  state = iota // it has no memory yet
	placed                // it has memory, and readers read it
	ready                 // all its bytes are in memory
	released              // the caller has released it, so the ring may reuse its memory
)

// item is one tensor of a Load.
type item struct {
	Tensor
	state state
	at    int64 // offset in ring.memory
	left  int64 // bytes that are still to be read
	bytes []byte
}

func (it *item) loaded() Loaded { return Loaded{it.Tensor, it.bytes} }

// align is the alignment in memory of a tensor that is not placed right after its neighbour in the
// file: a cache line.
const align = 64

// ring allocates memory for tensors from front to back, and then from the front again. Each tensor
// is contiguous, so the end of memory may stay unused. Empty tensors take no memory.
type ring struct {
	memory   []byte
	straight bool  // see Config.Straight
	live     []int // indices of the items that have memory, oldest first
}

// alignFrom returns the first aligned offset at or after at. An item begins at such an offset,
// unless place puts it right after its neighbour in the file.
func (r *ring) alignFrom(at int64, it *item) int64 {
	if r.straight {
		return at + (it.offset-at)&(pageBytes-1)
	}
	return (at + align - 1) / align * align
}

// place allocates memory for item i, after the newest item or, if there is no room up to the end of
// memory, at the front. It returns false if an item must be released before.
//
//	     oldest       newest               newest         oldest
//	[....|##############|....]    [##########|.............|########]
//	                     ^ here, else at 0    ^ here: the allocation has wrapped
//
// follows says that the item comes right after the newest one in its file. place then also puts it
// right after that one in memory if it can, so that one read covers both.
func (r *ring) place(items []item, i int, follows bool) bool {
	it := &items[i]
	at, limit := int64(0), int64(len(r.memory))
	if len(r.live) == 0 && it.Len > 0 {
		if at = r.alignFrom(0, it); at+it.Len > limit {
			at = 0 // it fits only without the alignment of Config.Straight
		}
	}
	if len(r.live) > 0 && it.Len > 0 {
		oldest, newest := &items[r.live[0]], &items[r.live[len(r.live)-1]]
		wrapped := newest.at < oldest.at
		if wrapped {
			limit = oldest.at
		}
		at = newest.at + newest.Len
		if !follows {
			at = r.alignFrom(at, it)
		}
		if at+it.Len > limit {
			at = r.alignFrom(0, it)
			if wrapped || at+it.Len > oldest.at {
				return false
			}
		}
	}
	it.at, it.state = at, placed
	it.bytes = r.memory[at : at+it.Len : at+it.Len]
	if it.Len > 0 {
		r.live = append(r.live, i)
	}
	return true
}

// release frees the memory of the oldest items up to the first one that is not released.
func (r *ring) release(items []item) {
	for len(r.live) > 0 && items[r.live[0]].state == released {
		r.live = r.live[1:]
	}
}

// held returns how many tensors the caller has and has not released.
func (r *ring) held(items []item) (n int) {
	for _, i := range r.live {
		if items[i].state == ready {
			n++
		}
	}
	return n
}
