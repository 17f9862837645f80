// SPDX-License-Identifier: Apache-2.0

package weights

// state is how far an item is.
type state uint8

const (
	waiting  state = iota
	placed         // it has memory, and is being read
	ready          // all of it is there
	released       // its memory may be another's
)

// item is one tensor of a Load.
type item struct {
	Tensor
	state state
	at    int64 // in memory
	left  int64 // bytes that are not there yet
	bytes []byte
}

func (it *item) loaded() Loaded { return Loaded{it.Tensor, it.bytes} }

// align is where in memory a tensor begins that does not follow its neighbour of the file:
// a line of the processor's cache.
const align = 64

// ring hands out memory in turn. Each tensor is in one piece, so the end of memory may stay unused.
// Empty tensors take none.
type ring struct {
	memory   []byte
	straight bool  // see Config.Straight
	live     []int // items that have memory, in the order in which they got it
}

// begin is the first place from at on for an item that does not follow its neighbour.
func (r *ring) begin(at int64, it *item) int64 {
	if r.straight {
		return at + (it.offset-at)&(pageBytes-1)
	}
	return (at + align - 1) / align * align
}

// place finds memory for an item. Follows says that it comes right after the last one in its file,
// and should in memory, so that one read brings both. There is none before something is released
// where it returns false.
func (r *ring) place(items []item, i int, follows bool) bool {
	it := &items[i]
	at, limit := int64(0), int64(len(r.memory))
	if len(r.live) == 0 && it.Len > 0 {
		if at = r.begin(0, it); at+it.Len > limit {
			at = 0 // not straight then
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
			at = r.begin(at, it)
		}
		if at+it.Len > limit {
			at = r.begin(0, it)
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

// release gives back what the oldest items have, as far as they were released.
func (r *ring) release(items []item) {
	for len(r.live) > 0 && items[r.live[0]].state == released {
		r.live = r.live[1:]
	}
}

// held counts the tensors that wait for their release.
func (r *ring) held(items []item) (n int) {
	for _, i := range r.live {
		if items[i].state == ready {
			n++
		}
	}
	return n
}
