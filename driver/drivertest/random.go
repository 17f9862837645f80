// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

const (
	randomSteps = 250              // of a run without a time
	randomBlock = 10 * time.Second // one run with a time
	regionCount = 3                // memories that one side reaches of the other
	slotCount   = 6                // places in each, for one batch at a time
	slotLen     = 70 << 10
	unheardMax  = 16 // messages that nobody has received yet
)

// random is a run of everything in an order that a seed decides, against the models of all bytes.
type random struct {
	*test
	*rand.Rand
	ways   []*way // from the near side to the far one and, where there are two, back
	counts map[string]int
}

// way is a connection from one side to the other, with a memory at each.
type way struct {
	from, to *side
	peer     int
	local    *memory
	regions  [regionCount]*memory
	flights  []*flight
	unheard  []*flight // with messages, in order of submission
}

// flight is a batch that has a slot of either memory for itself.
type flight struct {
	batch               *driver.Batch
	tag                 uint64
	region, slot, local int
	target              *memory
	at                  uint64 // of the slot in the target
	want                []byte // what the slot of the target holds if it succeeds
	err                 error
	cancelled, revoked  bool // an error that says so is right
}

// checkRandom registers, imports, moves with patterns, durably and with messages, cancels, revokes,
// drops, closes, freezes and kills.
func checkRandom(t *test) {
	seed := *randomSeed
	end := time.Time{}
	if *randomFor > 0 {
		end = time.Now().Add(min(*randomFor, randomBlock))
		if seed == 0 {
			seed = uint64(time.Now().UnixNano())
		}
	}
	t.Logf("go test -drivertest.seed=%d", seed)
	r := &random{t, rand.New(rand.NewPCG(seed, 1)), nil, map[string]int{}}
	defer func() {
		if t.Failed() {
			t.Logf("this was -drivertest.seed=%d", seed)
		}
		t.Logf("%v", r.counts)
	}()
	r.open()
	for step := 1; step <= randomSteps || time.Now().Before(end); step++ {
		w := r.ways[r.IntN(len(r.ways))]
		action, name := r.submit, "submit"
		switch dice := r.IntN(100); {
		case dice < 12:
			action, name = r.cancel, "cancel"
		case dice < 24:
			action, name = r.finishOne, "finish"
		case dice < 30:
			action, name = func(w *way) {
				region := r.IntN(regionCount)
				r.revoke(w, region)
				r.importToken(w, region)
			}, "revoke"
		case dice < 36:
			action, name = r.drop, "drop"
		case dice < 40:
			action, name = func(*way) { r.settle() }, "settle"
		case dice < 42:
			action, name = r.closePeer, "close peer"
		case dice < 45 && t.proc != nil:
			action, name = func(*way) { r.freeze() }, "freeze"
		case dice < 47 && t.proc != nil:
			action, name = func(*way) {
				r.ok(t.proc.kill(), "kill")
				r.killed(1)
			}, "kill"
		}
		r.counts[name]++
		action(w)
		if step%20 == 0 && t.proc != nil {
			r.counts["storm"]++
			r.storm()
		}
	}
	r.settle()
}

// open makes the memory of both sides, and connects them.
func (r *random) open() {
	r.ways = []*way{{from: r.near, to: r.far}}
	if r.wiring != Self {
		r.ways = append(r.ways, &way{from: r.far, to: r.near})
	}
	for _, w := range r.ways {
		w.local = w.from.local(regionCount * slotCount * slotLen)
		for i := range w.regions {
			w.regions[i] = w.to.shared(slotCount * slotLen)
		}
		r.reconnect(w)
	}
}

func (r *random) reconnect(w *way) {
	addr := w.to.must(request{Do: "addr"}).Data
	w.peer = w.from.must(request{Do: "connect", Data: addr}).ID
	for _, m := range w.regions {
		m.importKey = w.from.importToken(w.peer, m.token)
	}
}

// submit starts a batch between two slots that are free.
func (r *random) submit(w *way) {
	f := &flight{region: r.IntN(regionCount), slot: r.IntN(slotCount),
		local: r.IntN(regionCount * slotCount)}
	taken := func(o *flight) bool {
		return o.local == f.local || o.region == f.region && o.slot == f.slot
	}
	if slices.ContainsFunc(w.flights, taken) || slices.ContainsFunc(w.unheard, taken) ||
		len(w.unheard) >= unheardMax {
		r.finishOne(w)
		return
	}
	remote := w.regions[f.region]
	lBase, rBase := uint64(f.local)*slotLen, uint64(f.slot)*slotLen
	b := batch(bothOps[r.IntN(2)])
	if r.can(driver.CanPattern) && r.IntN(3) == 0 {
		count := 1 + r.IntN(20)
		p := &driver.Pattern{Run: 1 + r.Uint64N(slotLen/uint64(count)/2), Count: count,
			LocalKey: w.local.key, RemoteKey: remote.importKey, Local: driver.Side{Base: lBase,
				Stride: slotLen / uint64(count)}, Remote: driver.Side{Base: rBase,
				Stride: slotLen / uint64(count)}}
		for i := range uint32(count) {
			p.Remote.List = append(p.Remote.List, uint32(count)-1-i)
		}
		b.Pattern = p
	} else {
		n := 1 + r.Uint64N([]uint64{100, 5000, slotLen}[r.IntN(3)])
		count := 1 + r.Uint64N(min(5, n, uint64(r.caps.DescsMax)))
		for i := range count {
			d := driver.Desc{Local: lBase + (count-1-i)*(slotLen/count),
				Remote: rBase + i*(slotLen/count),
				Len:    max(1, n/count/(1+i)), LocalKey: w.local.key, RemoteKey: remote.importKey}
			b.Descs = append(b.Descs, d)
		}
	}
	if b.Op == driver.Write {
		w.local.fill(w.local.off+lBase, slotLen)
		switch {
		case r.can(driver.CanNotify) && r.IntN(2) == 0:
			v := voucher{uint64(remote.id), remote.off + rBase, slotLen}
			b = withMessage(b, v.encode())
		case r.can(driver.CanDurable):
			b.Durable = r.IntN(2) == 0
		}
	}
	f.batch, f.target, f.at = b, remote, rBase
	source, base := w.local.model()[lBase:][:slotLen], lBase
	if b.Op == driver.Read {
		f.target, f.at = w.local, lBase
		source, base = remote.model()[rBase:][:slotLen], rBase
	}
	f.want = bytes.Clone(f.target.model()[f.at:][:slotLen])
	descs := b.Descs
	if b.Pattern != nil {
		for i := range b.Pattern.Count {
			descs = b.Pattern.AppendDescs(descs, i)
		}
	}
	for _, d := range descs {
		from, to := d.Local, d.Remote
		if b.Op == driver.Read {
			from, to = to, from
		}
		copy(f.want[to-f.at:][:d.Len], source[from-base:])
	}
	f.tag = w.from.must(request{Do: "submit", Peer: w.peer, Batch: b}).Tag
	w.flights = append(w.flights, f)
	if b.Tail != driver.NoTail {
		w.unheard = append(w.unheard, f)
	}
}

func (r *random) cancel(w *way) {
	if len(w.flights) > 0 {
		f := w.flights[r.IntN(len(w.flights))]
		f.cancelled = true
		w.from.must(request{Do: "cancel", Peer: w.peer, Tag: f.tag})
	}
}

func (r *random) finishOne(w *way) {
	if len(w.flights) > 0 {
		r.finish(w, w.flights[r.IntN(len(w.flights))])
	}
}

// finish waits for the end of a flight, which may also be one of allowed, and has the model follow:
// from now on the bytes stay.
func (r *random) finish(w *way, f *flight, allowed ...error) {
	w.flights = slices.DeleteFunc(w.flights, func(o *flight) bool { return o == f })
	_, f.err = w.from.try(request{Do: "await", Tag: f.tag})
	if f.cancelled {
		allowed = append(allowed, driver.ErrAborted)
	}
	if f.revoked {
		allowed = append(allowed, driver.ErrRevoked)
	}
	what := fmt.Sprintf("%v of the %s side (cancelled: %v, revoked: %v)", f.batch.Op, w.from.name,
		f.cancelled, f.revoked)
	r.wantErr(f.err, what, append(allowed, nil)...)
	switch {
	case f.revoked && f.batch.Op == driver.Write: // the memory has had another use since
	case f.err == nil:
		copy(f.target.model()[f.at:], f.want)
	default:
		f.target.fill(f.target.off+f.at, slotLen)
	}
}

// finishAll ends all flights of a way.
func (r *random) finishAll(w *way, allowed ...error) {
	for len(w.flights) > 0 {
		r.finish(w, w.flights[0], allowed...)
	}
}

// hear receives the messages of batches that succeeded: in order, behind their bytes. Once the
// connection has ended those of others may have come, too, and the last message must.
func (r *random) hear(w *way, ended bool) {
	for {
		for !ended && len(w.unheard) > 0 && w.unheard[0].err != nil {
			w.unheard = w.unheard[1:]
		}
		if len(w.unheard) == 0 && !ended {
			return
		}
		m := w.to.receive()
		if errors.Is(m.Err, driver.ErrPeerLost) && ended {
			break
		}
		for ended && len(w.unheard) > 0 && w.unheard[0].err != nil &&
			!bytes.Equal(w.unheard[0].batch.Notify, m.Data) {
			w.unheard = w.unheard[1:]
		}
		if len(w.unheard) == 0 || !bytes.Equal(w.unheard[0].batch.Notify, m.Data) {
			r.broken("%q (%v) came to the %s side, not the next of %d messages", m.Data,
				m.Err, w.to.name, len(w.unheard))
		}
		f := w.unheard[0]
		w.unheard = w.unheard[1:]
		if f.err == nil && !f.revoked && m.Sum != sum(f.want) {
			r.broken("message %q came to the %s side before its bytes", m.Data, w.to.name)
		}
	}
	for _, f := range w.unheard {
		if f.err == nil {
			r.broken("the message of a batch that succeeded has not come")
		}
	}
	w.unheard = nil
}

// settle waits for all that is under way, and looks at all bytes.
func (r *random) settle() {
	for _, w := range r.ways {
		r.finishAll(w)
		if !r.can(driver.CanNotify) {
			for i := range w.regions { // what makes writes visible otherwise
				r.ok(w.regions[i].revoke(), "revoke")
				w.regions[i].reregister()
				r.importToken(w, i)
			}
			continue
		}
		r.hear(w, false)
		b := messageAlone([]byte("all is there"))
		w.from.run(w.peer, b)
		r.expectMessages(w.to, b.Notify)
	}
	for _, sp := range r.spaces {
		sp.expect("when all is settled")
	}
}

// revoke ends a memory under way, gives it another use and registers it anew.
func (r *random) revoke(w *way, region int) {
	m := w.regions[region]
	if r.IntN(3) == 0 {
		_ = m.revokeAtOnce() // the proof may be there, or not
	}
	r.ok(m.revoke(), "revoke")
	m.refill()
	m.reregister()
	for _, f := range slices.Concat(w.flights, w.unheard) {
		f.revoked = f.revoked || f.region == region
	}
}

// importToken gives the initiator the present token.
func (r *random) importToken(w *way, region int) {
	m := w.regions[region]
	m.importKey = w.from.importToken(w.peer, m.token)
}

// drop forgets a key and imports the memory again. What is under way is not disturbed.
func (r *random) drop(w *way) {
	region := r.IntN(regionCount)
	old := w.regions[region].importKey
	r.importToken(w, region)
	w.from.must(request{Do: "drop", Peer: w.peer, Key: old})
}

// closePeer closes a connection with work in flight.
func (r *random) closePeer(w *way) {
	w.from.closePeer(w.peer)
	r.closed(w)
}

// closed goes on by a new connection.
func (r *random) closed(w *way) {
	r.finishAll(w, driver.ErrClosed)
	if r.can(driver.CanNotify) {
		r.hear(w, true)
	}
	r.reconnect(w)
}

// freeze stops the far side with work in flight. The near side revokes what it writes to, or closes
// its own connection.
func (r *random) freeze() {
	r.ok(r.proc.freeze(), "freeze")
	out, back := r.ways[0], r.ways[1]
	closes := r.IntN(3) == 0
	if closes {
		r.near.closePeer(out.peer)
	}
	for i := range r.IntN(regionCount + 1) {
		r.revoke(back, i)
	}
	r.ok(r.proc.thaw(), "thaw")
	for i := range regionCount {
		r.importToken(back, i)
	}
	if closes {
		r.closed(out)
	}
}

// killed starts another far side, when the last has ended with work in flight, and with it that
// many connections to the near side.
func (r *random) killed(conns int) {
	out, back := r.ways[0], r.ways[1]
	for i := range regionCount {
		r.ok(back.regions[i].revoke(), "revoke when the peer is dead")
		back.regions[i].refill()
	}
	for _, f := range out.flights {
		err := r.await(f.tag)
		r.wantErr(err, "a batch in flight when the peer was killed", nil, driver.ErrPeerLost,
			driver.ErrAborted, driver.ErrRevoked)
		if f.batch.Op == driver.Read {
			f.target.fill(f.target.off+f.at, slotLen)
		}
	}
	r.near.closePeer(out.peer)
	for r.can(driver.CanNotify) && conns > 0 {
		if m := r.near.receive(); m.Err != nil {
			conns--
		}
	}
	for _, m := range append(back.regions[:], out.local) {
		m.expect("when the peer was killed")
		r.ok(m.revoke(), "revoke")
		r.near.must(request{Do: "free", ID: m.id})
	}
	r.spaces = nil
	r.startFar()
	r.open()
}

// The leases of a storm: parts of one memory, and memories of their own.
const leaseLen, leaseParts, leaseOwn = 4096, 22, 4

// leaseLasts reports whether a lease of a storm is not revoked: a few of the parts are not.
func leaseLasts(i int) bool { return i < leaseParts && i%5 == 2 }

// storm has many goroutines of the far side write to many leases, stops it at any moment, breaks
// its connections, revokes most leases side by side, gives them to others and lets it go on, or
// kills it: behind a revoke no byte of it lands, and in the leases that last its writes go on.
func (r *random) storm() {
	r.settle()
	back := r.connectBack()
	from := r.far.local(2 * leaseLen)
	whole := r.near.shared(leaseParts * leaseLen)
	var leases []*memory
	var tokens [][]byte
	for i := range uint64(leaseParts + leaseOwn) {
		m := whole
		if i < leaseParts {
			m = whole.registerRange(i*leaseLen, leaseLen)
		} else {
			m = r.near.shared(leaseLen)
		}
		leases, tokens = append(leases, m), append(tokens, m.token)
	}
	r.far.must(request{Do: "storm", Peer: back, ID: from.reg, Len: leaseLen, Tokens: tokens})
	for range r.IntN(3000) {
		runtime.Gosched() // any moment
	}
	frozen, mend := r.IntN(8) > 0, func() {}
	if frozen {
		r.ok(r.proc.freeze(), "freeze")
	}
	lossy := r.h.Disturb != nil && r.IntN(5) == 0
	if lossy {
		r.counts["disturb"]++
		mend = r.h.Disturb(r.host.b, r.Rand)
	}
	var all sync.WaitGroup
	errs := make([]error, len(leases))
	for _, i := range r.Perm(len(leases)) {
		if !leaseLasts(i) {
			all.Go(func() {
				errs[i] = leases[i].revoke()
				leases[i].readIntoModel(0, leaseLen)
			})
		}
	}
	all.Wait()
	r.ok(errors.Join(errs...), "revoke leases (the writer stands still: %v)", frozen)
	for i, m := range leases { // whose bytes have stayed since, while others were revoked
		got := m.bytes()
		if !leaseLasts(i) && !bytes.Equal(got, m.model()) {
			r.broken("lease %d, behind its revoke (the writer stands still: %v): %s", i, frozen,
				difference(got, m.model()))
		}
	}
	for i, m := range leases[leaseParts:] { // other memory comes in its place
		m.free()
		leases[leaseParts+i] = r.near.shared(leaseLen)
	}
	for i, m := range leases[:leaseParts] {
		if !leaseLasts(i) {
			m.refill()
		}
	}
	mend()
	dies := !lossy && r.IntN(6) == 0
	if dies {
		r.ok(r.proc.kill(), "kill")
	} else {
		r.stormEnds(back, frozen, lossy)
		r.ok(from.revoke(), "revoke")
		from.free()
	}
	for i, m := range leases {
		if !leaseLasts(i) {
			continue
		}
		r.ok(m.revoke(), "revoke a lease that lasted") // makes its last write visible
		if dies || lossy {
			m.refill()
		} else {
			copy(m.model(), from.model())
		}
	}
	whole.expect("behind a revoke of leases (the writer stood still: %v)", frozen)
	for i, m := range append(leases, whole) {
		m.expect("behind a revoke of leases")
		r.ok(m.revoke(), "revoke")
		if i >= leaseParts {
			m.free()
		}
	}
	if dies {
		r.killed(2)
	}
}

// stormEnds lets the far side go on until each of its writers was refused.
func (r *random) stormEnds(back int, frozen, lossy bool) {
	if frozen {
		r.ok(r.proc.thaw(), "thaw")
	}
	if _, err := r.far.try(request{Do: "end"}); err != nil && lossy {
		r.wantErr(err, "writes by connections that broke", driver.ErrPeerLost)
	} else {
		r.ok(err, "writes to leases that were revoked")
	}
	r.far.closePeer(back)
	if r.can(driver.CanNotify) {
		r.expectLastMessage(r.near)
	}
	if !lossy {
		return
	}
	w := r.ways[1]
	w.from.closePeer(w.peer)
	if r.can(driver.CanNotify) {
		r.expectLastMessage(r.near)
	}
	r.reconnect(w)
}
