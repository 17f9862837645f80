// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// run is the goroutine of the tier. What fails is tried again in a second, while the store is used.
func (t *Tier) run() {
	defer close(t.ended)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for t.life.Err() == nil {
		if t.requests.unused() == nil {
			t.round()
		}
		select {
		case <-t.wake:
		case <-tick.C:
		case <-t.life.Done():
		}
	}
}

// round does what there is to do. Its errors are those of Stats.
func (t *Tier) round() {
	t.mu.RLock()
	ready, overrun := t.ready, t.overrun
	t.mu.RUnlock()
	if !ready && (overrun || t.readIndexes(t.life) != nil) {
		return
	}
	t.packing.Lock()
	if t.open != nil && time.Since(t.open.began) > t.cfg.linger {
		t.rotate()
	}
	t.packing.Unlock()
	if errors.Join(t.send(t.life), t.entomb(t.life), t.collect(t.life, 0)) != nil {
		return
	}
	if time.Since(t.swept) > time.Hour {
		t.swept = time.Now() // also where it fails: not each store, nor each right, has these
		before := time.Now().Add(-uploadAge)
		_ = t.requests.do(t.life, "end uploads", listTimeout, func(ctx context.Context) error {
			return t.requests.AbortUploads(ctx, t.cfg.Prefix, before)
		})
	}
}

// readIndexes is the story of a start: the indexes of all objects under the prefix, the tombstones
// first, and of the packs the newest first.
func (t *Tier) readIndexes(ctx context.Context) error {
	var packs, tombs []Info
	t.mu.Lock() // before the list: tombstones that are written from now on are in both
	t.blocks, t.packs, t.bytes, t.doomed = map[blockID]entry{}, nil, 0, nil
	t.tombs, t.names, t.unsure, t.hiding = nil, map[uint64]string{}, 0, 0
	t.mu.Unlock()
	err := t.requests.do(ctx, "list "+t.cfg.Prefix, listTimeout, func(ctx context.Context) error {
		packs, tombs = nil, nil
		return t.requests.List(ctx, t.cfg.Prefix, func(o Info) error {
			switch { // others are not of this tier
			case strings.HasSuffix(o.Name, packSuffix):
				packs = append(packs, o)
			case strings.HasSuffix(o.Name, tombSuffix):
				tombs = append(tombs, o)
			}
			if len(packs)+len(tombs) > objectsMax {
				return fmt.Errorf("more than %d objects: %w", objectsMax, engine.ErrBounds)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	for _, list := range []*[]Info{&packs, &tombs} {
		slices.SortFunc(*list, func(a, b Info) int { return strings.Compare(b.Name, a.Name) })
		*list = slices.CompactFunc(*list, func(a, b Info) bool { return a.Name == b.Name })
	}

	gone := map[blockID]uint64{} // by the number of the newest tombstone
	t.mu.Lock()
	for _, o := range slices.Concat(packs, tombs) {
		t.number = max(t.number, t.numberOf(o.Name))
	}
	t.listed = true
	t.mu.Unlock()
	err = t.eachIndex(ctx, tombs, func(o Info, f *footer, records []record) {
		for _, r := range records {
			gone[r.blockID] = max(gone[r.blockID], f.number)
		}
		t.addTomb(f.number, o.Name)
	})
	if err != nil {
		return err
	}
	err = t.eachIndex(ctx, packs, func(o Info, f *footer, records []record) {
		if f.number < t.unsure {
			t.doomed = append(t.doomed, o.Name)
			return
		}
		p := &pack{name: o.Name, number: f.number, size: o.Size, written: f.written,
			used: time.Unix(f.written, 0)}
		for k := range records {
			switch r := &records[k]; {
			case gone[r.blockID] >= f.number:
			case len(t.blocks) < t.cfg.Blocks:
				t.add(p, r)
			default:
				t.hide(p)
			}
		}
		t.packs = append(t.packs, p)
		t.bytes += uint64(p.size)
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range t.early {
		if e, ok := t.blocks[id]; ok {
			t.forget(id, e)
		}
	}
	if t.ready = !t.overrun; t.ready {
		t.early = nil
	}
	return nil
}

// addTomb notes a tombstone in the store. The caller holds mu.
func (t *Tier) addTomb(number uint64, name string) {
	if _, has := t.names[number]; !has {
		t.tombs = append(t.tombs, number)
		t.names[number] = name
	}
}

// numberOf is the number in the name of an object of a tier, 0 in other names.
func (t *Tier) numberOf(name string) uint64 {
	text, _, _ := strings.Cut(strings.TrimPrefix(name, t.cfg.Prefix), "-")
	if n, err := strconv.ParseUint(text, 16, 63); err == nil && len(text) == 16 {
		return n
	}
	return 0
}

// eachIndex reads the indexes of objects, several at a time, and calls visit with mu held. One that
// has no index belongs to no tier: it is deleted if it is old. But where it is a tombstone by its
// name, what was removed is not known, and all older packs are doomed.
func (t *Tier) eachIndex(ctx context.Context, list []Info,
	visit func(o Info, f *footer, records []record)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan Info)
	var all sync.WaitGroup
	for range min(requestsMax, len(list)) {
		all.Go(func() {
			for o := range next {
				f, records, err := t.readIndex(ctx, o)
				t.mu.Lock()
				switch {
				case err == nil:
					visit(o, &f, records)
				case errors.Is(err, errNotPack) && strings.HasSuffix(o.Name, tombSuffix) &&
					t.numberOf(o.Name) > 0:
					t.addTomb(t.numberOf(o.Name), o.Name)
					t.unsure = max(t.unsure, t.numberOf(o.Name))
				case errors.Is(err, errNotPack):
					if time.Since(o.At) > orphanAge {
						t.doomed = append(t.doomed, o.Name)
					}
				case !errors.Is(err, fs.ErrNotExist):
					cancel(err)
				}
				t.mu.Unlock()
			}
		})
	}
	for _, o := range list {
		if ctx.Err() == nil {
			next <- o
		}
	}
	close(next)
	all.Wait()
	return context.Cause(ctx)
}

// readIndex reads the end of an object: once or, where the index is long, twice.
func (t *Tier) readIndex(ctx context.Context, o Info) (f footer, records []record, err error) {
	read := func(n int64) []byte {
		p := make([]byte, min(n, o.Size))
		if err == nil && len(p) > 0 {
			err = t.requests.do(ctx, "read the index of "+o.Name, len(p),
				func(ctx context.Context) error {
					return t.requests.Get(ctx, o.Name, "", o.Size-int64(len(p)),
						[][]byte{p})
				})
		}
		return p
	}
	tail := read(tailBytes)
	if err == nil {
		f, err = readFooter(tail, o.Size)
	}
	if err == nil && f.number != t.numberOf(o.Name) {
		err = notPack("number %d", f.number)
	}
	if err == nil && f.indexBytes() > int64(len(tail)) {
		tail = read(f.indexBytes())
	}
	if err == nil {
		records, err = f.readIndex(tail)
	}
	return f, records, err
}

// collect deletes packs that are expired or have no block left, and where there would be too many
// with so many bytes more, those that were used longest ago; and tombstones that no pack needs.
func (t *Tier) collect(ctx context.Context, more uint64) error {
	t.mu.Lock()
	now, oldest := time.Now().Unix(), uint64(math.MaxUint64)
	old := func(number uint64) bool {
		return time.Since(time.Unix(0, int64(number))) >= t.cfg.tombAge
	}
	last := uint64(0) // packs up to this one have too many tombstones above them
	if n := len(t.tombs) - tombsMax; n > 0 {
		slices.Sort(t.tombs)
		if old(t.tombs[n-1]) {
			last = t.tombs[n-1]
		}
	}
	t.forgetPacks(func(p *pack) bool {
		return p.live == 0 || t.expired(p, now) || p.number <= last
	})
	full := func() bool { return t.bytes+more > t.cfg.Bytes || len(t.blocks) >= t.cfg.Blocks }
	if full() {
		slices.SortFunc(t.packs, func(a, b *pack) int { return a.used.Compare(b.used) })
		t.forgetPacks(func(*pack) bool { return full() })
	}
	for _, p := range t.packs {
		oldest = min(oldest, p.number)
	}
	if p := t.sending; p != nil {
		oldest = min(oldest, p.number)
	}
	t.tombs = slices.DeleteFunc(t.tombs, func(number uint64) bool {
		if number >= oldest || !old(number) {
			return false
		}
		t.doomed = append(t.doomed, t.names[number])
		delete(t.names, number)
		return true
	})
	names := slices.Clone(t.doomed)
	t.mu.Unlock()
	for k, name := range names {
		err := t.requests.do(ctx, "delete "+name, 0, func(ctx context.Context) error {
			return t.requests.Delete(ctx, name)
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w; %d more objects are to be deleted", err, len(names)-k-1)
		}
		t.mu.Lock()
		t.doomed = t.doomed[1:] // others are appended
		t.mu.Unlock()
	}
	return nil
}

// forgetPacks has the blocks of packs be found no more, and their objects be deleted. The caller
// holds mu.
func (t *Tier) forgetPacks(which func(p *pack) bool) {
	t.packs = slices.DeleteFunc(t.packs, func(p *pack) bool {
		if !which(p) {
			return false
		}
		t.bytes -= uint64(p.size)
		if p.hides {
			t.hiding--
		}
		for _, id := range p.ids {
			if e, ok := t.blocks[id]; ok && e.pack == p {
				t.forget(id, e)
			}
		}
		t.doomed = append(t.doomed, p.name)
		return true
	})
}
