// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/kv/cluster/placement"
)

// told is what the node tells others: the last changes, for who has all before them, and all of it
// in parts, for who has not.
type told struct {
	node, generation uint64

	mu      sync.Mutex // guards what follows
	journal *placement.Journal
	changes []change // the last ones
	bytes   int      // of those
	load    uint64
	hot     []placement.Hot
	surplus map[placement.Key]bool
	sorted  []placement.Key // surplus; nil: not yet
	news    chan struct{}   // closed when a change comes
}

// change is a digest, encoded.
type change struct {
	seq  uint64
	text []byte
}

// Changes are kept up to these; a client that is slower gets all anew.
const (
	changesMax      = 64
	changesBytesMax = 4 << 20
)

// sinceText is up to where a client knows all.
type sinceText struct {
	Generation uint64
	Seq        uint64        // of the last change; in the middle of a snapshot of that before it
	Part       uint32        // of a snapshot, that comes next; 0: a change does
	From       placement.Key // that Part begins with
}

func (t *told) open(node, generation uint64) {
	t.node, t.generation = node, generation
	t.journal = placement.NewJournal(node, generation)
	t.news = make(chan struct{})
}

// have says which blocks the node has beyond its share.
func (t *told) have(surplus map[placement.Key]bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	note := func(key placement.Key, add func(placement.Key) bool) {
		if !add(key) {
			t.cut()
		}
	}
	same := true
	for key := range t.surplus {
		if !surplus[key] {
			note(key, t.journal.Remove)
			same = false
		}
	}
	for key := range surplus {
		if !t.surplus[key] {
			note(key, t.journal.Add)
			same = false
		}
	}
	if !same {
		t.surplus, t.sorted = surplus, nil
	}
}

// endChange has those who wait know of a change, where there is one.
func (t *told) endChange(load uint64, hot []placement.Hot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.load, t.hot = load, hot
	t.cut()
	close(t.news)
	t.news = make(chan struct{})
}

// cut makes a digest of what has changed. The caller holds the lock.
func (t *told) cut() {
	d := t.journal.Cut(t.load, t.hot)
	c := change{d.Seq, d.Append(nil)}
	t.changes, t.bytes = append(t.changes, c), t.bytes+len(c.text)
	for len(t.changes) > changesMax || t.bytes > changesBytesMax {
		t.bytes -= len(t.changes[0].text)
		t.changes = t.changes[1:]
	}
}

// last is the number of the last change; 0: there is none. The caller holds the lock.
func (t *told) last() uint64 {
	if len(t.changes) == 0 {
		return 0
	}
	return t.changes[len(t.changes)-1].seq
}

// await returns what follows since, once there is something.
func (t *told) await(ctx context.Context, text []byte) (digest, next []byte, err error) {
	var since sinceText
	if n, err := binary.Decode(text, binary.LittleEndian, &since); err != nil || n != len(text) ||
		since.Generation != t.generation {
		since = sinceText{}
	}
	for {
		t.mu.Lock()
		digest, since := t.after(since)
		news := t.news
		t.mu.Unlock()
		if digest != nil {
			next, _ = binary.Append(nil, binary.LittleEndian, since)
			return digest, next, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
}

// after returns what follows since; nil: nothing does yet. The caller holds the lock.
func (t *told) after(since sinceText) (digest []byte, next sinceText) {
	last := t.last()
	if since.Generation == t.generation && since.Part == 0 {
		if since.Seq == last {
			return nil, since
		}
		for _, c := range t.changes {
			if c.seq == since.Seq+1 {
				since.Seq++
				return c.text, since
			}
		}
		since.Generation = 0 // it is gone, or was never made
	}
	if since.Generation != t.generation || since.Seq > last {
		since = sinceText{t.generation, last, 1, placement.Key{}}
	}
	if t.sorted == nil {
		t.sorted = make([]placement.Key, 0, len(t.surplus))
		for key := range t.surplus {
			t.sorted = append(t.sorted, key)
		}
		slices.SortFunc(t.sorted, compareKeys)
	}
	from, _ := slices.BinarySearchFunc(t.sorted, since.From, compareKeys)
	list := t.sorted[from:]
	part := list[:min(len(list), placement.DigestMax)]
	for d := range t.journal.Snapshot(t.load, t.hot, slices.Values(part)) { // one
		d.Seq, d.Part = since.Seq, since.Part
		digest = d.Append(nil)
	}
	if since.Part++; len(part) == len(list) {
		since.Part = 0
	} else {
		since.From = list[len(part)]
	}
	return digest, since
}

func compareKeys(a, b placement.Key) int { return bytes.Compare(a[:], b[:]) }
