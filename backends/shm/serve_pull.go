// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"

	"github.com/sluicehq/sluice/backends"
)

// pullEntry is one stretch, copied out of the page before it is checked: the
// peer may change the page at any time.
type pullEntry struct{ from, to, n uint64 }

// pull serves one request: the number of its place.
func (c *inbound) pull(body []byte) error {
	if len(body) != 2 || body[0] >= pullMax {
		return fmt.Errorf("pull request: %w", backends.ErrCorrupt)
	}
	at := pullAt + int(body[0])*pullBytes
	err := c.pullInto(c.page[at : at+pullBytes])
	return c.bell.ring(msgPulled, body[0], statusOf(err))
}

func (c *inbound) pullInto(place []byte) error {
	if !word(place, pullStateAt).CompareAndSwap(pullPosted, pullTaken) {
		return backends.ErrAborted
	}
	count := word(place, pullCountAt).Load()
	key, epoch := word(place, pullKeyAt).Load(), word(place, pullEpochAt).Load()
	if count > pullEntriesMax || key >= uint64(len(c.b.memories)) {
		return backends.ErrBounds
	}
	m := c.b.memory(uint32(key))
	if m == nil {
		return backends.ErrRevoked
	}
	if m.arena != nil {
		return backends.ErrBounds // shared memory is never pulled
	}
	if m.readOnly {
		return backends.ErrReadOnly
	}
	m.pulls.Add(1) // Fence waits for it, after it ended the epoch
	defer m.pulls.Add(-1)
	if c.b.table.epoch(m.key).Load() != epoch {
		return backends.ErrRevoked
	}
	v := vectorPool.Get().(*vectors)
	defer vectorPool.Put(v)
	for i := range count {
		e := place[pullEntriesAt+i*pullEntryBytes:]
		d := pullEntry{word(e, 0).Load(), word(e, 8).Load(), word(e, 16).Load()}
		if d.n == 0 || !within(d.to, d.n, uint64(len(m.bytes))) {
			v.reset()
			return backends.ErrBounds
		}
		v.add(m.bytes[d.to:d.to+d.n], d.from)
	}
	return v.flush(&c.pid)
}
