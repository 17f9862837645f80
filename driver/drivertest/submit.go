// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// checkLengths moves ranges of lengths and places at which code takes another way.
func checkLengths(t *test) {
	const size = 5 << 20
	l, r := t.local(size), t.remote(size)
	lens := []uint64{1, 2, 7, 8, 9, 63, 64, 65, 255, 511, 512, 513, 656, 4095, 4096, 4097, 8192,
		16383, 16385, 65535, 65536, 65537, 100000, 262143, 1<<20 - 1, 1<<20 + 1, 4<<20 + 3}
	for i, n := range lens {
		for j, at := range [][2]uint64{{0, 0}, {1, 4097}, {4095, 511}, {8192 + 77, 13}} {
			op := bothOps[(i+j)%2]
			t.move(t.batchOf(op, l, at[0], r, at[1], n))
			t.move(t.batchOf(bothOps[(i+j+1)%2], l, at[1]+77, r, at[0]+size/8, n))
			if n > 100000 {
				break
			}
		}
		t.compare("after ranges of %d bytes", n)
		l.refill()
	}
	t.move(t.batchOf(driver.Write, l, size-9, r, size-9, 9))
	t.compare("after a write of the last bytes")
}

// checkManyDescriptors fills batches of DescsMax with pieces, in any order and in several memories:
// at first a byte lies between one and the next, and then they touch, on one side or on both.
func checkManyDescriptors(t *test) {
	const far = 3
	count := uint64(t.caps.DescsMax)
	l := t.local(count * 100)
	var r [far]*memory
	for i := range r {
		r[i] = t.remote(count * 100)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 10 {
		b := batch(bothOps[round%2])
		for at, i := range random.Perm(int(count)) {
			i, n, to := uint64(i), 1+random.Uint64N(99), random.IntN(far)
			rOff := (count - 1 - i) * 100
			if round >= 6 { // in the order of the near side
				i, n, to = uint64(at), 100, 0
				if rOff = i * 100; round >= 8 {
					rOff = (i ^ 1) * 100 // here, neighbours change places
				}
			}
			if rOff < count*100 {
				b.Descs = append(b.Descs, desc(l, i*100, r[to], rOff, n))
			}
		}
		t.move(b)
		t.compare("after %v of %d pieces", b.Op, count)
	}
}

// checkNotKept changes batches as soon as Submit has returned, and messages.
func checkNotKept(t *test) {
	const n = 300 << 10
	l, r := t.local(2*n), t.remote(2*n)
	descs := t.split(desc(l, 0, r, n, n))
	msg := make([]byte, min(100, t.caps.MessageMax))
	var list []posted
	var sent [][]byte
	for round := range 20 {
		b := batch(driver.Write, slices.Clone(descs)...)
		if t.can(driver.CanNotify) && round%2 == 0 {
			pattern(msg, uint64(round))
			b, sent = withMessage(b, msg), append(sent, slices.Clone(msg))
		}
		var p *driver.Pattern
		if t.can(driver.CanPattern) && round%4 == 3 {
			b = patternBatch(driver.Write, l, r, driver.Pattern{Run: 1000, Count: 2,
				Loops: []driver.Loop{{N: 20, Local: 3000, Remote: 5000}},
				Local: driver.Side{Stride: 60000}, Remote: driver.Side{Stride: 100000}})
			p = b.Pattern
		}
		tag := t.submit(b).tag
		t.apply(b)
		list = append(list, posted{tag, batch(driver.Write)})
		for i := range b.Descs {
			b.Descs[i] = driver.Desc{Local: 1, Remote: 2, Len: 3, LocalKey: l.key,
				RemoteKey: r.importKey}
		}
		if p != nil {
			p.Loops[0] = driver.Loop{N: 3, Local: 1, Remote: 1}
			*p = driver.Pattern{Run: 1, Count: 1, LocalKey: l.key, RemoteKey: r.importKey}
		}
		clear(msg)
	}
	t.awaitSuccess("changed behind Submit", list...)
	t.expectMessages(t.far, sent...)
	t.compare("after batches that were changed behind Submit")
}

// outside are ranges that leave a memory of n bytes, by offset and length.
func outside(n uint64) [][2]uint64 {
	const top = math.MaxUint64
	return [][2]uint64{{n, 1}, {n - 1, 2}, {0, n + 1}, {n + 1, 1}, {1, n}, {top, 1}, {top, 2},
		{top - 63, 64}, {top - 63, 65}, {top - 4095, 8192}, {0, top}, {1, top}, {n, top - n + 1},
		{1 << 63, 1 << 63}, {0, 0}, {n, 0}}
}

// eachWay submits a descriptor that must be refused, in every way that the peer takes.
func (t *test) eachWay(what string, want error, op driver.Op, good, bad driver.Desc) {
	ways := map[string]*driver.Batch{"": batch(op, bad)}
	if t.caps.DescsMax > 1 {
		ways[" behind a good one"] = batch(op, good, bad)
	}
	if t.can(driver.CanNotify) && op == driver.Write {
		ways[" with a message"] = withMessage(batch(op, bad), []byte("must not arrive"))
	}
	if t.can(driver.CanDurable) && op == driver.Write {
		ways[" that is durable"] = &driver.Batch{Op: op, Descs: []driver.Desc{bad}, Durable: true}
	}
	if t.can(driver.CanPattern) {
		ways[" as a pattern"] = patternBatch(op, &memory{key: bad.LocalKey},
			&memory{importKey: bad.RemoteKey}, driver.Pattern{Run: bad.Len, Count: 1,
				Local:  driver.Side{Base: bad.Local},
				Remote: driver.Side{Base: bad.Remote}})
	}
	for way, b := range ways {
		t.refused(fmt.Sprintf("%v %s%s", op, what, way), want, b)
	}
}

// checkBounds leaves the bounds of memory that is a part of a larger one: only a check of bounds
// keeps a batch out of the rest.
func checkBounds(t *test) {
	const n = 10000
	lAll, rAll := t.local(3*n), t.remote(3*n)
	l, r := lAll.registerRange(n, n), rAll.registerRange(n, n)
	t.locals[l.key] = l
	t.importMemory(r)
	for _, op := range bothOps {
		for _, o := range outside(n) {
			for side, bad := range map[string]driver.Desc{"local": desc(l, o[0], r, 0, o[1]),
				"remote": desc(l, 0, r, o[0], o[1])} {
				t.eachWay(fmt.Sprintf("past %s bounds, %d+%d of %d", side, o[0], o[1], n),
					driver.ErrBounds, op, desc(l, 0, r, 0, 1), bad)
			}
		}
		if !t.can(driver.CanPattern) {
			continue
		}
		for what, p := range map[string]driver.Pattern{
			"a listed slot":  {Remote: driver.Side{Stride: 100, List: []uint32{0, 99, 100}}},
			"a large slot":   {Local: driver.Side{Stride: 100, List: []uint32{0, 1<<32 - 1, 1}}},
			"the last entry": {Remote: driver.Side{Stride: 4950 + 1}},
			"an entry":       {Local: driver.Side{Per: 3, Step: 4950 + 1, Stride: 1}},
			"a loop":         {Loops: []driver.Loop{{N: 101, Local: 10, Remote: 100}}},
			"a far loop":     {Loops: []driver.Loop{{N: 1 << 31, Local: 1 << 40, Remote: 1}}},
			"many loops":     {Loops: slices.Repeat([]driver.Loop{{N: 1}}, driver.LoopsMax+1)},
			"short lists":    {Local: driver.Side{Stride: 100, List: []uint32{0, 1}}},
		} {
			p.Run, p.Count = 100, 3
			t.refused(fmt.Sprintf("%v of a pattern past bounds by %s", op, what), driver.ErrBounds,
				patternBatch(op, l, r, p))
		}
	}
	t.move(batch(driver.Write, desc(l, n-1, r, n-1, 1)))
	t.compare("after batches that were refused")
}

// checkKeys names memory that is unknown, forgotten, closed or read-only.
func checkKeys(t *test) {
	const n = 100
	l, r := t.local(n), t.remote(n)
	dropped, closed, fixed := t.remote(n), t.local(n), t.far.allocate("shared", n)
	readOnly := fixed.register(guard, n, request{ReadOnly: true})
	t.importMemory(readOnly)
	t.drop(dropped)
	t.ok(closed.revoke(), "revoke")
	delete(t.locals, closed.key)
	good := desc(l, 0, r, 0, n)
	for _, op := range bothOps {
		bad := func(what string, local, remote uint32) {
			d := good
			d.LocalKey, d.RemoteKey = local, remote
			t.eachWay(fmt.Sprintf("with %s key, %d and %d", what, local, remote),
				driver.ErrBounds, op, good, d)
		}
		for _, key := range []uint32{r.importKey + 1000, r.importKey + 1<<16, 1 << 31,
			math.MaxUint32, dropped.importKey} {
			bad("a bad remote", l.key, key)
		}
		for _, key := range []uint32{l.key + 1000, 1 << 31, math.MaxUint32, closed.key} {
			bad("a bad local", key, r.importKey)
		}
	}
	for _, key := range []uint32{dropped.importKey, r.importKey + 1000, math.MaxUint32} {
		t.peer.Drop(key) // of what is not there: ignored
	}
	t.eachWay("to read-only memory", driver.ErrReadOnly, driver.Write, good,
		desc(l, 0, readOnly, 0, n))
	t.move(batch(driver.Read, desc(l, 0, readOnly, 0, n)))
	t.move(batch(driver.Write, good))
	t.compare("after batches with bad keys")
}

// checkCan submits what the bits of the peer, or the rules of a batch, refuse.
func checkCan(t *test) {
	l, r := t.local(4096), t.remote(4096)
	descs := []driver.Desc{desc(l, 0, r, 64, 64)}
	p := &driver.Pattern{Run: 64, Count: 1, LocalKey: l.key, RemoteKey: r.importKey}
	for _, b := range []*driver.Batch{
		{Descs: descs}, {Op: 3, Descs: descs}, {Op: driver.Write}, {Op: driver.Read},
		{Op: driver.Read, Tail: driver.NotifyTail, Descs: descs},
		{Op: driver.Write, Tail: driver.NotifyTail + 1, Descs: descs},
		{Op: driver.Read, Durable: true, Descs: descs},
		{Op: driver.Write, Durable: true, Tail: driver.NotifyTail, Descs: descs},
		{Op: driver.Write, Descs: descs, Pattern: p}, {Op: driver.Write, Pattern: p},
		{Op: driver.Read, Pattern: p}, {Op: driver.Write, Tail: driver.NotifyTail},
		{Op: driver.Write, Durable: true, Descs: descs},
	} {
		if want := b.Check(t.peer.Can()); want != nil {
			t.refused(fmt.Sprintf("%+v", b), want, b)
		}
	}
	if !t.can(driver.CanNotify) {
		n, err := t.host.receiveOnce(make([]driver.Message, 4))
		if n != 0 || err != nil || t.host.b.Answer(1, nil) == nil {
			t.Errorf("a backend without notifications received %d (%v), or takes answers", n, err)
		}
	}
	can := t.peer.Can()
	t.move(batch(driver.Write, descs...))
	if again := t.peer.Can(); again != can {
		t.Errorf("Can is %b, then %b: it must be constant", can, again)
	}
	t.compare("after batches that the peer does not take")
}

// checkOnly moves within the ranges of a Segment.Only, and beside them.
func checkOnly(t *test) {
	const size = 32000
	ranges := driver.Ranges{{Off: 100, Len: 1}, {Off: 4096, Len: 4096}, {Off: 20000, Len: 5000}}
	l, r := t.local(size), t.far.sharedRanges(size, ranges, t.near, t.peerID)
	if r == nil {
		t.Log("not run: peers reach such memory as a whole alone")
		return
	}
	t.remotes[r.importKey] = r
	for _, op := range bothOps {
		for _, in := range ranges {
			t.move(t.batchOf(op, l, in.Off+7, r, in.Off, in.Len))
			t.move(batch(op, desc(l, 7, r, in.Off+in.Len-1, 1)))
		}
		beside := map[string]*driver.Batch{}
		for _, at := range []driver.Range{{Off: 0, Len: 1}, {Off: 12000, Len: 64},
			{Off: 101, Len: 1}, {Off: 4095, Len: 2}, {Off: 4096, Len: 4097}, {Off: 0, Len: size}} {
			beside[fmt.Sprint(at)] = t.batchOf(op, l, at.Off, r, at.Off, at.Len)
		}
		if t.can(driver.CanPattern) {
			p := driver.Pattern{Count: 3, Run: 100, Local: driver.Side{Stride: 100},
				Remote: driver.Side{Base: 4096, Stride: 1000, List: []uint32{0, 3, 4}}}
			beside["an entry"] = patternBatch(op, l, r, p)
			p.Remote.List = []uint32{0, 1, 3}
			p.Loops = []driver.Loop{{N: 2, Local: 300, Remote: 12000}}
			beside["a run of a nest"] = patternBatch(op, l, r, p)
		}
		for what, b := range beside {
			if err := t.outcomeOf(b); t.h.Guards != errors.Is(err, driver.ErrBounds) {
				t.Errorf("%v beside the ranges, %s: %v, and Harness.Guards is %v", op, what, err,
					t.h.Guards)
			}
		}
	}
	if !t.h.Guards {
		return // engines look, and this suite has not
	}
	l.refill() // of a batch that failed some may have landed, within the ranges
	for _, in := range ranges {
		t.move(batch(driver.Write, desc(l, in.Off, r, in.Off, in.Len)))
	}
	t.compare("after all that was beside the ranges")
}

// checkPatterns moves scattered entries of many shapes.
func checkPatterns(t *test) {
	const size = 2 << 20
	l, r := t.local(size), t.remote(size)
	random := rand.New(rand.NewPCG(3, 4))
	list := func(n, of int) (list []uint32) {
		for _, i := range random.Perm(of)[:n] {
			list = append(list, uint32(i))
		}
		return list
	}
	most := min(t.caps.RunsMax, 4000)
	for i, p := range []driver.Pattern{
		{Run: 1, Count: 1},
		{Run: 656, Count: 300, Local: driver.Side{Stride: 656},
			Remote: driver.Side{Base: 77, Stride: 4096, List: list(300, 500)}},
		{Run: 500, Count: most, Local: driver.Side{Stride: 500, List: list(most, 4000)},
			Remote: driver.Side{Stride: 501}},
		{Run: 64, Count: 100, Local: driver.Side{Base: 5, Stride: 1000, Step: 64, Per: 8, First: 3},
			Remote: driver.Side{Stride: 9000, Step: 100, Per: 5, First: 4, List: list(21, 200)}},
		{Run: 70000, Count: 10, Local: driver.Side{Stride: 70001}, Remote: driver.Side{Base: 1,
			Stride: 100000, List: list(10, 20)}},
		{Run: 100, Count: 20, Loops: []driver.Loop{{N: 4, Local: 8192, Remote: 100},
			{N: 3, Local: 128, Remote: 20000}}, Local: driver.Side{Stride: 40000, List: list(20,
			50)},
			Remote: driver.Side{Stride: 401}},
		{Run: 8, Count: 2, Loops: []driver.Loop{{N: 10, Local: 8, Remote: 16},
			{N: 5, Local: 1000, Remote: 200}, {N: 2, Local: 100, Remote: 9000}},
			Local:  driver.Side{Stride: 6000, Per: 2, Step: 20000},
			Remote: driver.Side{Base: 3, Stride: 30000}},
		{Run: 4096, Count: 16, Local: driver.Side{Stride: 4096}, Remote: driver.Side{Stride: 4096}},
	} {
		if p.Count*p.Runs() > t.caps.RunsMax {
			continue
		}
		for _, op := range bothOps {
			b := patternBatch(op, l, r, p)
			if t.can(driver.CanNotify) && op == driver.Write && i%2 == 0 {
				b = withMessage(b, []byte("behind a pattern"))
			}
			t.move(b)
			if b.Tail != driver.NoTail {
				t.expectMessages(t.far, b.Notify)
			}
			t.compare("after %v of pattern %d", op, i)
			l.refill()
		}
	}
}

// checkPatternChanges changes index lists while batches are under way: whatever is moved, it is not
// a byte outside the memories.
func checkPatternChanges(t *test) {
	const slots, run = 400, 2000
	l, r := t.local(slots*run), t.remote(slots*run)
	for round := range 12 {
		lists := [2][]uint32{make([]uint32, slots), make([]uint32, slots)}
		for i := range lists[0] {
			lists[0][i], lists[1][i] = uint32(i), uint32(slots-1-i)
		}
		p := t.submit(patternBatch(bothOps[round%2], l, r, driver.Pattern{Run: run, Count: slots,
			Local:  driver.Side{Stride: run, List: lists[0]},
			Remote: driver.Side{Stride: run, List: lists[1]}}))
		overwrite(lists[round/2%2], []uint32{slots, slots + 1, 1 << 20, math.MaxUint32}[round%4])
		t.wantErr(t.await(p.tag), "a pattern whose list changes", nil, driver.ErrBounds)
		l.refill()
		r.refill()
		t.compare("after a pattern whose list changed")
	}
}

// overwrite races with the backend: that is the test.
//
//go:norace
func overwrite(list []uint32, with uint32) {
	for i := range list {
		list[len(list)-1-i] = with
	}
}

// checkFaults has memory spoilt by the program that owns it, near or far: batches that need it
// fail, and nothing else does.
func checkFaults(t *test) {
	const size = 512 << 10
	const half = size / 2
	sides := []*side{t.near}
	if t.caps.Pairs.Serves(driver.DRAM, driver.DRAM) {
		sides = append(sides, t.far)
	} else if !t.caps.Pairs.Serves(driver.DRAM, driver.File) {
		t.Log("not run: the backend has no hand in memory of hosts")
		return
	}
	for _, on := range sides {
		for _, how := range []string{unmapped, protected, readOnly, truncated} {
			bad := on.must(request{Do: "allocate", Kind: how, Len: size}).ID
			reg := on.must(request{Do: "register", ID: bad, Len: size})
			l, r := &memory{key: reg.Key, size: size}, t.remote(size)
			if on == t.far {
				l, r = t.local(size), &memory{size: size, token: reg.Data}
				t.importMemory(r)
				delete(t.remotes, r.importKey)
			}
			on.must(request{Do: "spoil", ID: bad})
			for i, op := range bothOps {
				if how == readOnly && (op == driver.Write) == (on == t.near) {
					continue // it is only read
				}
				what := fmt.Sprintf("%v, memory of the %s side is %s", op, on.name, how)
				for _, at := range []driver.Range{{Off: 0, Len: size}, {Off: half - 50, Len: 100},
					{Off: half, Len: 100000}} {
					b := t.batchOf(op, l, at.Off, r, at.Off, at.Len)
					t.wantErr(t.outcomeOf(b), what, driver.ErrFault)
					if t.can(driver.CanNotify) && op == driver.Write {
						b = withMessage(b, []byte("must not arrive"))
						t.wantErr(t.outcomeOf(b), what+", with a message", driver.ErrFault)
					}
				}
				if t.can(driver.CanPattern) {
					b := patternBatch(op, l, r, driver.Pattern{Count: 8, Run: 200,
						Local:  driver.Side{Base: half, Stride: 1000},
						Remote: driver.Side{Base: half, Stride: 3000}})
					t.wantErr(t.outcomeOf(b), what+", a pattern", driver.ErrFault)
				}
				good, other := t.local(10000), t.remote(10000)
				t.move(t.batchOfAll(bothOps[1-i], good, other))
				if on == t.near { // what the batches have named is unspecified
					r.refill()
				} else {
					l.refill()
				}
				t.compare("after %s", what)
			}
			on.must(request{Do: "revoke", ID: reg.ID})
		}
	}
}

// checkNoAllocation counts what Submit and Poll allocate, for batches that are moved at once and
// for such as are handed on.
func checkNoAllocation(t *test) {
	l, r := t.local(1<<20), t.remote(1<<20)
	scattered := batch(driver.Write)
	for i := range uint64(min(64, t.caps.DescsMax)) {
		scattered.Descs = append(scattered.Descs, desc(l, (63-i)*700, r, i*700, 656))
	}
	ways := map[string]*driver.Batch{"a short piece": batch(driver.Write, desc(l, 0, r, 0, 1)),
		"scattered pieces": scattered, "a long piece": t.batchOfAll(driver.Write, l, r)}
	if t.can(driver.CanPattern) {
		p := driver.Pattern{Run: 512, Count: 31,
			Loops: []driver.Loop{{N: 2, Local: 16 << 10, Remote: 1 << 10},
				{N: 8, Local: 1 << 10, Remote: 2 << 10}},
			Local: driver.Side{Stride: 32 << 10}, Remote: driver.Side{Stride: 32 << 10}}
		for i := range uint32(p.Count) {
			p.Remote.List = append(p.Remote.List, 30-i)
		}
		odd, plain := p, p
		odd.Remote.List, plain.Remote.List = nil, nil
		odd.Count, odd.Loops = 3, []driver.Loop{{N: 2, Local: 600, Remote: 700}}
		odd.Local.Stride, odd.Remote.Stride, odd.Remote.Base = 32<<10+1, 30<<10+3, 5
		plain.Count, plain.Loops, plain.Remote.Stride = 5, nil, 30<<10+1
		ways["a pattern"] = patternBatch(driver.Write, l, r, p)
		ways["a pattern at odd places"] = patternBatch(driver.Write, l, r, odd)
		ways["a plain pattern at odd places"] = patternBatch(driver.Write, l, r, plain)
	}
	if t.can(driver.CanDurable) {
		ways["a durable piece"] = &driver.Batch{Op: driver.Write, Durable: true,
			Descs: []driver.Desc{desc(l, 0, r, 0, 656)}}
	}
	tag, done := uint64(1), make([]driver.Completion, 1)
	for what, b := range ways {
		for _, b.Op = range bothOps {
			if b.Durable && b.Op == driver.Read {
				continue
			}
			var failure error
			once := func() {
				if tag++; failure == nil {
					failure = t.roundTrip(tag, b, done)
				}
			}
			for range 25 {
				once() // what a backend makes on first use
			}
			count := testkit.AllocsPerRun(50, once)
			t.ok(failure, "%v of %s", b.Op, what)
			if count > 0 && !testkit.RaceEnabled { // under which sync.Pool forgets
				t.Errorf("%v of %s: %v allocations from Submit to Poll, want 0", b.Op, what, count)
			}
		}
	}
}

// roundTrip submits and polls past the host, which allocates.
func (t *test) roundTrip(tag uint64, b *driver.Batch, done []driver.Completion) error {
	w := newWait(t.h.limit)
	err := t.peer.Submit(tag, b)
	for errors.Is(err, driver.ErrFull) && w.more() {
		err = t.peer.Submit(tag, b)
	}
	for err == nil {
		n, err := t.host.b.Poll(done)
		switch {
		case err != nil:
			return err
		case n == 1 && done[0].Tag != tag:
			return fmt.Errorf("tag %d completed, want %d", done[0].Tag, tag)
		case n == 1:
			return done[0].Err
		case !w.more():
			return errLate
		}
	}
	return err
}
