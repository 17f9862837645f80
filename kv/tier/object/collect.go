// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
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
	if !t.ready { // which this goroutine alone changes
		if t.readIndexes(t.life) != nil {
			return
		}
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
		before := time.Now().Add(-uploadAge)
		err := t.requests.do(t.life, "end uploads", listTimeout, func(ctx context.Context) error {
			return t.requests.AbortUploads(ctx, t.cfg.Prefix, before)
		})
		if err == nil {
			t.swept = time.Now()
		}
	}
}

// readIndexes is the story of a start: the indexes of all objects under the prefix, the tombstones
// first, and of the packs the newest first.
func (t *Tier) readIndexes(ctx context.Context) error {
	var packs, tombs []Info
	err := t.requests.do(ctx, "list "+t.cfg.Prefix, listTimeout, func(ctx context.Context) error {
		packs, tombs = nil, nil
		return t.requests.List(ctx, t.cfg.Prefix, func(o Info) error {
			switch { // others are not of this tier
			case strings.HasSuffix(o.Name, packSuffix):
				packs = append(packs, o)
			case strings.HasSuffix(o.Name, tombSuffix):
				tombs = append(tombs, o)
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	slices.SortFunc(packs, func(a, b Info) int { return strings.Compare(b.Name, a.Name) })

	gone := map[blockID]uint64{} // by the number of the newest tombstone
	t.mu.Lock()
	t.blocks, t.packs, t.bytes, t.doomed = map[blockID]entry{}, nil, 0, nil
	t.tombs, t.names = nil, map[uint64]string{}
	t.mu.Unlock()
	err = t.eachIndex(ctx, tombs, func(o Info, f *footer, records []record) {
		for _, r := range records {
			gone[r.blockID] = max(gone[r.blockID], f.number)
		}
		t.tombs = append(t.tombs, f.number)
		t.names[f.number] = o.Name
	})
	if err != nil {
		return err
	}
	err = t.eachIndex(ctx, packs, func(o Info, f *footer, records []record) {
		p := &pack{name: o.Name, number: f.number, size: o.Size, written: f.written,
			used: time.Unix(f.written, 0)}
		for k := range records {
			if r := &records[k]; gone[r.blockID] < f.number && len(t.blocks) < t.cfg.Blocks {
				t.add(p, r)
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
	for _, r := range t.removed { // before the tier was ready
		if e, ok := t.blocks[r.blockID]; ok {
			t.forget(r.blockID, e)
		}
	}
	t.ready = !t.overrun
	return nil
}

// eachIndex reads the indexes of objects, several at a time, and calls visit with mu held. One that
// has no index belongs to no tier: it is deleted if it is old.
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
					t.number = max(t.number, f.number)
					visit(o, &f, records)
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
					return t.requests.Get(ctx, o.Name, o.Size-int64(len(p)), [][]byte{p})
				})
		}
		return p
	}
	tail := read(tailBytes)
	if err == nil {
		f, err = readFooter(tail, o.Size)
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
	for _, p := range slices.Clone(t.packs) {
		if p.live == 0 || t.expired(p, now) {
			t.forgetPack(p)
		}
	}
	for len(t.packs) > 0 && (t.bytes+more > t.cfg.Bytes || len(t.blocks) >= t.cfg.Blocks) {
		t.forgetPack(slices.MinFunc(t.packs, func(a, b *pack) int {
			return a.used.Compare(b.used)
		}))
	}
	for _, p := range t.packs {
		oldest = min(oldest, p.number)
	}
	if p := t.sending; p != nil {
		oldest = min(oldest, p.number)
	}
	t.tombs = slices.DeleteFunc(t.tombs, func(number uint64) bool {
		if number >= oldest || time.Since(time.Unix(0, int64(number))) < t.cfg.tombAge {
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
		t.doomed = slices.DeleteFunc(t.doomed, func(o string) bool { return o == name })
		t.mu.Unlock()
	}
	return nil
}

// forgetPack has the blocks of a pack be found no more, and its object be deleted. The caller holds
// mu.
func (t *Tier) forgetPack(p *pack) {
	k := slices.Index(t.packs, p)
	if k < 0 {
		return // another one has
	}
	t.packs = slices.Delete(t.packs, k, k+1)
	t.bytes -= uint64(p.size)
	for _, id := range p.ids {
		if e, ok := t.blocks[id]; ok && e.pack == p {
			t.forget(id, e)
		}
	}
	t.doomed = append(t.doomed, p.name)
}
