// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// breach does to a batch what the contract forbids. f has what is left for later.
// Preconditions: the batch is checked.
func (p *peer) breach(f *flight, tag uint64, x *batch, v *verdict) error {
	y := *x
	switch {
	case v.breach.corrupt:
		y = corrupted(x, p.b.caps.DescsMax)
	case v.breach.skip:
		y = shortened(x, p.b.caps.DescsMax)
	}
	switch {
	case v.breach.early && v.ending == 0:
		return p.early(f, tag, &y, v)
	case v.breach.overtake && v.ending == 0 && y.pieces() > 0:
		return p.overtake(f, tag, &y, v)
	case v.ending == Swallow || v.ending == Fail || !v.start.IsZero() || p.mustLine(y.letter):
		return p.holdUp(f, tag, &y, v)
	case y.pieces() == 0 && y.letter == noLetter: // nothing is left of it
		v.ending = Fail
		return p.holdUp(f, tag, x, v)
	}
	f.b.mu.Lock()
	f.keep(&y) // for what lands late
	f.b.mu.Unlock()
	return p.goOn(f, tag, &y)
}

// early completes a batch at once, and has its bytes move later under a tag of ours.
func (p *peer) early(f *flight, tag uint64, x *batch, v *verdict) error {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	b.places++ // for the completion; f keeps its own
	b.deliver(driver.Completion{Tag: tag})
	f.launch(p, x, v.breach.after)
	return nil
}

// launch has a batch move later, of which nobody hears.
// Preconditions: b.mu is held.
func (f *flight) launch(p *peer, x *batch, after time.Duration) {
	f.keep(x)
	f.breach, f.own, f.ripe = breach{}, true, true
	f.enter(p, f.b.ownTag(), waiting)
	f.wait(time.Now().Add(after))
}

// ownTag returns a tag that no batch of the program has.
// Preconditions: b.mu is held.
func (b *backend) ownTag() uint64 {
	for {
		b.hidden++
		tag := b.hidden ^ 0xfa17_0000_0000_0000
		if b.flights[tag] == nil {
			return tag
		}
	}
}

// overtake sends the message of a batch, and has its bytes move later.
func (p *peer) overtake(f *flight, tag uint64, x *batch, v *verdict) error {
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
	if err := p.pass(own, &batch{op: x.op, letter: x.letter, msg: x.msg}); err != nil {
		g.giveUp()
		return err
	}
	y := *x
	y.letter, y.msg = noLetter, nil
	f.breach = breach{}
	v.start = time.Now().Add(v.breach.after)
	return p.holdUp(f, tag, &y, v)
}

// aftermath lets the bytes of a batch land that has ended with an error.
// Preconditions: b.mu is held.
func (f *flight) aftermath(err error) {
	if !f.breach.late || err == nil {
		return
	}
	b, p, x := f.b, f.p, f.batch
	x.descs = append([]driver.Desc(nil), f.batch.descs...)
	if x.pages != nil {
		x = batch{op: x.op, descs: expanded(&f.pages, f.pages.Count)}
	}
	x.letter, x.msg = noLetter, nil
	type place struct{ to, from []byte }
	var places []place
	for _, d := range x.descs {
		local, remote, err := p.extents(x.op, d.LocalKey, d.RemoteKey)
		if err != nil || local.mem == nil || remote.mem == nil {
			b.launchLater(p, x, f.breach.after)
			return
		}
		l, r := local.mem[d.Local:][:d.Len], remote.mem[d.Remote:][:d.Len]
		if x.op == driver.Read {
			l, r = r, l
		}
		places = append(places, place{r, l})
	}
	b.clock.set(&moment{come: func() {
		known.RLock() // while it is held, what is mapped stays registered
		defer known.RUnlock()
		for _, at := range places {
			if isRegistered(at.to) && isRegistered(at.from) {
				copy(at.to, at.from)
			}
		}
	}}, time.Now().Add(f.breach.after))
}

// launchLater is the late write where the memory is another process's: one more batch,
// which an honest peer refuses if the epoch has ended.
// Preconditions: b.mu is held.
func (b *backend) launchLater(p *peer, x batch, after time.Duration) {
	if g := b.take(); g != nil {
		g.launch(p, &x, after)
	}
}

// isRegistered reports whether bytes are of memory that somebody has registered.
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
func corrupted(x *batch, descsMax int) batch {
	y := shortened(x, descsMax)
	last, ok := lastOf(x, descsMax)
	if !ok || last.Len < 2 {
		return y
	}
	half := last.Len / 2
	tail := last
	tail.Remote, tail.Len = last.Remote+last.Len-half, half
	if x.op == driver.Read {
		tail.Local, tail.Remote = last.Local+last.Len-half, last.Remote
	}
	last.Len -= half
	rest := y.descs[:max(0, min(len(y.descs)-1, descsMax-2))]
	y.descs = append(rest[:len(rest):len(rest)], last, tail)
	return y
}

// shortened is a batch without its last byte.
func shortened(x *batch, descsMax int) batch {
	last, ok := lastOf(x, descsMax)
	if !ok {
		return *x
	}
	y := *x
	if x.pages != nil {
		y.pages, y.descs = nil, expanded(x.pages, descsMax)
	} else {
		y.descs = append([]driver.Desc(nil), x.descs...)
	}
	if last.Len--; last.Len == 0 {
		y.descs = y.descs[:len(y.descs)-1]
	} else {
		y.descs[len(y.descs)-1] = last
	}
	return y
}

func lastOf(x *batch, descsMax int) (d driver.Desc, ok bool) {
	switch {
	case x.pages != nil:
		return x.pages.Desc(min(x.pages.Count, descsMax) - 1), true
	case len(x.descs) > 0:
		return x.descs[len(x.descs)-1], true
	}
	return d, false
}

func expanded(pages *driver.Pages, most int) (list []driver.Desc) {
	for i := range min(pages.Count, most) {
		list = append(list, pages.Desc(i))
	}
	return list
}
