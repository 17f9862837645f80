// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"math"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// breach does to a batch what the contract forbids. f has what is left for later.
// Preconditions: the batch is checked.
func (p *peer) breach(f *flight, tag uint64, x *driver.Batch, v *verdict) error {
	y := *x
	switch {
	case v.breach.is(corrupt):
		y = corrupted(x, p.b.caps.DescsMax)
	case v.breach.is(skip):
		y = shortened(x, p.b.caps.DescsMax)
	}
	switch {
	case v.breach.is(early) && v.ending == 0:
		return p.early(f, tag, &y, v)
	case v.breach.is(overtake) && v.ending == 0 && piecesOf(&y) > 0:
		return p.overtake(f, tag, &y, v)
	case v.ending == swallow || v.ending == fail || !v.start.IsZero() || p.mustLine(y.Tail):
		return p.holdUp(f, tag, &y, v)
	case piecesOf(&y) == 0 && y.Tail == driver.NoTail: // nothing is left of it
		v.ending = fail
		return p.holdUp(f, tag, x, v)
	}
	f.b.mu.Lock()
	f.keep(&y) // for what lands late
	f.b.mu.Unlock()
	return p.goOn(f, tag, &y)
}

// early completes a batch at once, and has its bytes move later under a tag of ours.
func (p *peer) early(f *flight, tag uint64, x *driver.Batch, v *verdict) error {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	b.places++ // for the completion; f keeps its own
	b.deliver(driver.Completion{Tag: tag})
	f.launch(p, x, v.breach.after)
	return nil
}

// launch has a batch move later, of which the caller is not told.
// Preconditions: b.mu is held.
func (f *flight) launch(p *peer, x *driver.Batch, after time.Duration) {
	f.keep(x)
	f.breach, f.own, f.ripe = breach{}, true, true
	f.enter(p, f.b.ownTag(), waiting)
	f.wait(time.Now().Add(after))
}

// ownTag returns a tag that no batch of the program has.
// Preconditions: b.mu is held.
func (b *Backend) ownTag() uint64 {
	for {
		b.hidden++
		tag := b.hidden ^ 0xfa17_0000_0000_0000
		if b.flights[tag] == nil {
			return tag
		}
	}
}

// overtake sends the message of a batch, and has its bytes move later.
func (p *peer) overtake(f *flight, tag uint64, x *driver.Batch, v *verdict) error {
	b := f.b
	b.mu.Lock()
	g := b.take()
	if g == nil {
		b.mu.Unlock()
		return driver.ErrFull
	}
	g.own = true
	g.enter(p, b.ownTag(), flying)
	own := g.tag
	b.mu.Unlock()
	if err := p.Peer.Submit(own, &driver.Batch{Op: x.Op, Tail: x.Tail,
		Notify: x.Notify}); err != nil {
		g.giveUp()
		return err
	}
	y := *x
	y.Tail, y.Notify = driver.NoTail, nil
	f.breach = breach{}
	v.start = time.Now().Add(v.breach.after)
	return p.holdUp(f, tag, &y, v)
}

// aftermath lets the bytes of a batch land that has ended with an error.
// Preconditions: b.mu is held.
func (f *flight) aftermath(err error) {
	if !f.breach.is(lateWrite) || err == nil {
		return
	}
	b, p, x := f.b, f.p, f.batch
	x.Descs = append([]driver.Desc(nil), f.batch.Descs...)
	if x.Pattern != nil {
		x = driver.Batch{Op: x.Op, Descs: expanded(&f.pattern, math.MaxInt)}
	}
	x.Tail, x.Notify = driver.NoTail, nil
	type place struct{ to, from []byte }
	var places []place
	for _, d := range x.Descs {
		local, remote, err := p.extents(x.Op, d.LocalKey, d.RemoteKey)
		if err != nil || local.mem == nil || remote.mem == nil {
			b.launchLater(p, x, f.breach.after)
			return
		}
		l, r := local.mem[d.Local:][:d.Len], remote.mem[d.Remote:][:d.Len]
		if x.Op == driver.Read {
			l, r = r, l
		}
		places = append(places, place{r, l})
	}
	b.clock.set(&moment{come: func() {
		known.RLock() // while it is held, no backend ends
		defer known.RUnlock()
		for _, at := range places {
			if isRegistered(at.to) && isRegistered(at.from) {
				_, _ = hostmem.CopyCatchingFault(at.to, at.from) // its program may have unmapped it
			}
		}
	}}, time.Now().Add(f.breach.after))
}

// launchLater is the late write where the memory is another process's: one more batch,
// which an honest peer refuses if the epoch has ended.
// Preconditions: b.mu is held.
func (b *Backend) launchLater(p *peer, x driver.Batch, after time.Duration) {
	if g := b.take(); g != nil {
		g.launch(p, &x, after)
	}
}

// isRegistered reports whether bytes are of memory of a backend that is open.
// Preconditions: known is held.
func isRegistered(part []byte) bool {
	for _, m := range known.segments {
		if contains(m.seg.Mem, part) {
			return true
		}
	}
	return false
}

// corrupted is a batch that puts the wrong bytes in the right places: the second half of
// its last piece gets the first half once more.
func corrupted(x *driver.Batch, descsMax int) driver.Batch {
	y := shortened(x, descsMax)
	last, ok := lastOf(x, descsMax)
	if !ok || last.Len < 2 {
		return y
	}
	half := last.Len / 2
	tail := last
	tail.Remote, tail.Len = last.Remote+last.Len-half, half
	if x.Op == driver.Read {
		tail.Local, tail.Remote = last.Local+last.Len-half, last.Remote
	}
	last.Len -= half
	rest := y.Descs[:max(0, min(len(y.Descs)-1, descsMax-2))]
	y.Descs = append(rest[:len(rest):len(rest)], last, tail)
	return y
}

// shortened is a batch without its last byte.
func shortened(x *driver.Batch, descsMax int) driver.Batch {
	last, ok := lastOf(x, descsMax)
	if !ok {
		return *x
	}
	y := *x
	if x.Pattern != nil {
		y.Pattern, y.Descs = nil, expanded(x.Pattern, descsMax)
	} else {
		y.Descs = append([]driver.Desc(nil), x.Descs...)
	}
	if last.Len--; last.Len == 0 {
		y.Descs = y.Descs[:len(y.Descs)-1]
	} else {
		y.Descs[len(y.Descs)-1] = last
	}
	return y
}

func lastOf(x *driver.Batch, descsMax int) (d driver.Desc, ok bool) {
	list := x.Descs
	if x.Pattern != nil {
		list = expanded(x.Pattern, descsMax)
	}
	if len(list) == 0 {
		return d, false
	}
	return list[len(list)-1], true
}

// expanded returns the runs of a pattern as descriptors, at most so many.
func expanded(p *driver.Pattern, most int) (list []driver.Desc) {
	for i := 0; i < p.Count && len(list) < most; i++ {
		list = p.AppendDescs(list, i)
	}
	return list[:min(len(list), most)]
}
