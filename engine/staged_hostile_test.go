// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// TestStagedForgeries sends the peer's engine requests that it must not obey: nothing of its
// memory changes, and honest ones go on.
func TestStagedForgeries(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	b := newHost(t, "b")
	honest, liar := newHost(t, "honest"), newHost(t, "liar")
	p, q := connect(t, honest.e, b.e), connect(t, liar.e, b.e)
	good, bad := transfer(t, p, Write), transfer(t, q, Write)
	check(t, good.Add(honest.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
	m := remote(t, q, "hbm")
	check(t, bad.Add(liar.hbm, 0, m, 0, hostBytes))
	fill(honest.mem, 5) // what was written stays in the slots, for a forgery to place
	fill(liar.mem, 77)
	run(t, good)
	run(t, bad)
	fill(b.mem, 42)
	before := bytes.Clone(b.mem)

	token := m.tokens[liar.e.stager.lane.index]
	honestHop := farHop{slot: 1, number: 1 << 20, token: token, count: 1}
	lie := func(change func(h *farHop)) []byte {
		h := honestHop
		change(&h)
		return h.append([]byte{isPut})
	}
	changed := func(b []byte, at int, to byte) []byte {
		b = bytes.Clone(b)
		b[at] = to
		return b
	}
	secret := changed(token, 0, token[0]+1)
	key := changed(token, 16, token[16]+1)
	epoch := changed(token, 20, token[20]+1)
	for name, msg := range map[string][]byte{
		"a slot too many": lie(func(h *farHop) { h.slot = slotsMax }),
		"another secret":  lie(func(h *farHop) { h.token = secret }),
		"another key":     lie(func(h *farHop) { h.token = key }),
		"another epoch":   lie(func(h *farHop) { h.token = epoch }),
		"too long a list": lie(func(h *farHop) { h.count = listMax + 1 }),
		"no list":         lie(func(h *farHop) { h.count = 0 }),
		"too many entries": lie(func(h *farHop) {
			h.paged, h.pages = true, Pages{Count: 2, EntryLen: pieceBytes}
		}),
		"empty entries": lie(func(h *farHop) { h.paged, h.pages = true, Pages{Count: 2} }),
		"past the end": lie(func(h *farHop) {
			h.paged, h.pages = true, Pages{Count: 1, EntryLen: 8, RemoteBase: 1 << 60}
		}),
		"strides that lap": lie(func(h *farHop) {
			h.paged, h.pages = true, Pages{Count: 9, EntryLen: 8, RemoteStride: 1 << 62}
		}),
		"flags of no-one":    changed(lie(func(*farHop) {}), 1+nameBytes+farToken, 0xff),
		"cut":                lie(func(*farHop) {})[:1+20],
		"nothing":            {isPut},
		"an unknown kind":    {200},
		"a window from afar": {isWindow},
		"a second hello":     append([]byte{isHello}, make([]byte, 200)...),
		"a short withdrawal": {isWithdrawn, 1},
		"an answer to none":  append([]byte{isHopEnd}, make([]byte, 30)...),
		"the end of a part":  {isPart, lastPart, 1, 2, 3},
	} {
		if err := q.tell(within(t), q.conns[0].lane, msg); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	behind := transfer(t, q, Read)
	check(t, behind.Add(liar.hbm, 0, m, 0, 1))
	run(t, behind) // its request came behind them all
	eventually(t, "the hops have ended", func() {
		for b.e.slots.posted() > 0 {
			time.Sleep(time.Millisecond)
		}
	})
	if !bytes.Equal(b.mem, before) {
		t.Error("a forgery has changed the peer's memory")
	}
	fill(honest.mem, 3)
	run(t, good)
	if !bytes.Equal(b.mem, honest.mem) || bytes.Equal(before, b.mem) {
		t.Error("the peer's memory has other bytes than the honest ones")
	}
	run(t, bad) // its own rights it has kept
	if !bytes.Equal(b.mem, liar.mem) {
		t.Error("an honest request of the same peer has failed")
	}
	if n := len(b.e.Notifications()); n != 0 {
		t.Errorf("the program has received %d messages", n)
	}
}

// TestStagedListIsReadOnce changes a list while it is read: no piece leaves the slot, and no
// entry the memory. The second is the Transfer's work, on the copy.
func TestStagedListIsReadOnce(t *testing.T) {
	list := make([]byte, listBytes)
	for _, lens := range [][]uint64{{pieceBytes + 1}, {1, pieceBytes}, {1 << 63, 1 << 63}, {0}} {
		for i, n := range lens {
			binary.LittleEndian.PutUint64(list[listEntry*i+8:], n)
		}
		h := farHop{count: len(lens)}
		if _, _, err := h.readList(list, nil, nil); !errors.Is(err, ErrBounds) {
			t.Errorf("pieces of %d bytes: %v", lens, err)
		}
	}
}

// FuzzFarHop has what was parsed stay within a slot, and come back the same.
func FuzzFarHop(f *testing.F) {
	token := make([]byte, farToken)
	h := farHop{slot: 2, number: 3, token: token, count: 4}
	f.Add(h.append(nil), uint64(1))
	h.paged, h.listed, h.pages = true, true, Pages{Count: 5, EntryLen: 656, RemoteStride: 656}
	f.Add(h.append(nil), uint64(2))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		var h farHop
		if h.parse(b) != nil {
			return
		}
		if !bytes.Equal(h.append(nil), b) {
			t.Errorf("%x comes back as %x", b, h.append(nil))
		}
		list := make([]byte, listBytes)
		r := rand.NewPCG(seed, 1)
		for i := 0; i < len(list); i += 8 {
			binary.LittleEndian.PutUint64(list[i:], r.Uint64()>>(r.Uint64()%64))
		}
		descs, indices, err := h.readList(list, nil, nil)
		if err != nil {
			return
		}
		sum := uint64(0)
		for _, d := range descs {
			sum += d.Len
		}
		if h.paged {
			sum = h.pages.Bytes()
		}
		if sum > pieceBytes || len(indices) > h.pages.Count {
			t.Errorf("%d bytes, %d indices", sum, len(indices))
		}
	})
}

// TestStagedOutcomes brings errors over the wire.
func TestStagedOutcomes(t *testing.T) {
	for _, want := range farErrors {
		got := parseOutcome(appendOutcome(nil, want))
		if !errors.Is(got, want) || want != nil && got.Error() != want.Error() {
			t.Errorf("%v has come as %v", want, got)
		}
	}
	long := parseOutcome(appendOutcome(nil, errors.New(string(make([]byte, 5000)))))
	if !errors.Is(long, errFar) || len(long.Error()) != whyMax {
		t.Errorf("a long text: %v", long)
	}
	for _, b := range [][]byte{nil, {200}, make([]byte, 2+whyMax)} {
		if err := parseOutcome(b); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%d bytes: %v", len(b), err)
		}
	}
}

// TestStagedRateIsMeasured replaces the chain's estimate like a backend's.
func TestStagedRateIsMeasured(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	m := remote(t, p, "hbm")
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, m, 0, hostBytes))
	for range rateSamplesMin {
		run(t, tr)
	}
	x, err := a.e.Explain(p, a.hbm, m)
	check(t, err)
	if c := x.Candidates[len(x.Candidates)-1]; c.Backend != Staged || !c.Measured || c.Rate <= 0 ||
		c.Estimate <= 0 {
		t.Errorf("explained %+v", c)
	}
}

// TestStagedFence waits for the hops of an epoch, and lets none begin in it any more.
func TestStagedFence(t *testing.T) {
	h := newHost(t, "h")
	s := h.e.stager
	memory := h.hbm.mems[s.lane.index].(*stagedMemory)
	token, err := memory.AppendToken(nil)
	check(t, err)
	m, err := s.enter(token)
	check(t, err)
	soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := s.Fence(soon, memory.key); !errors.Is(err, ErrTimeout) {
		t.Errorf("with a hop under way: %v", err)
	}
	fence := make(chan error, 1)
	go func() { fence <- s.Fence(within(t), memory.key) }()
	if _, err := s.enter(token); !errors.Is(err, ErrRevoked) {
		t.Errorf("a token of an epoch that is over: %v", err)
	}
	m.leave()
	check(t, <-fence)
	token, err = memory.AppendToken(nil)
	check(t, err)
	m, err = s.enter(token)
	check(t, err)
	m.leave()
}

// TestStagedRequestsAreBounded by what a slot holds, before the list is looked at.
func TestStagedRequestsAreBounded(t *testing.T) {
	ok := farHop{token: make([]byte, farToken), count: listMax}
	check(t, new(farHop).parse(ok.append(nil)))
	for name, h := range map[string]farHop{
		"descriptors": {count: listMax + 1},
		"indices": {paged: true, listed: true, pages: Pages{Count: listBytes/4 + 1,
			EntryLen: 1}},
		"entries": {paged: true, pages: Pages{Count: pieceBytes/656 + 1, EntryLen: 656}},
	} {
		h.token = ok.token
		if err := new(farHop).parse(h.append(nil)); !errors.Is(err, ErrBounds) {
			t.Errorf("too many %s: %v", name, err)
		}
	}
}
