// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// request writes one as a peer of ours would, and returns what follows the head.
func sumBody(t testing.TB, s *summing) []byte {
	t.Helper()
	s.way = &sumWay{far: make([]byte, 16), number: 7}
	b, err := s.appendRequest(nil, []byte("a token of some bytes"))
	check(t, err)
	return b[headBytes:]
}

func TestSumRequests(t *testing.T) {
	pages := &Pages{EntryLen: 16, Count: 3, RemoteBase: 100, RemoteStride: 50, Remote: []uint32{2, 0, 1}}
	plain := &Pages{EntryLen: 16, Count: 2, RemoteBase: 100, RemoteStride: 50}
	for name, c := range map[string]struct {
		s    *summing
		want [][2]uint64
	}{
		"descriptors":     {&summing{descs: []driver.Desc{{Remote: 5, Len: 10}, {Remote: 500, Len: 1}}}, [][2]uint64{{5, 10}, {500, 1}}},
		"a listed one":    {&summing{pages: pages}, [][2]uint64{{200, 16}, {100, 16}, {150, 16}}},
		"one that is not": {&summing{pages: plain}, [][2]uint64{{100, 16}, {150, 16}}},
	} {
		var r sumRequest
		check(t, r.parse(sumBody(t, c.s)))
		if r.audit != 7 || r.count != len(c.want) || string(r.token) != "a token of some bytes" {
			t.Errorf("%s: %+v", name, r)
		}
		for i, want := range c.want {
			if off, n, ok := r.at(i, 1000); !ok || off != want[0] || n != want[1] {
				t.Errorf("%s: range %d is %d at %d (%v), want %v", name, i, n, off, ok, want)
			}
		}
		end := c.want[0][0] + c.want[0][1]
		if _, _, ok := r.at(0, end); !ok {
			t.Errorf("%s: the end of the memory is out of bounds", name)
		}
		if _, _, ok := r.at(0, end-1); ok {
			t.Errorf("%s: past the end of the memory", name)
		}
	}
}

// What a peer may say reaches no byte outside the memory that it named.
func FuzzSumRequest(f *testing.F) {
	f.Add(sumBody(f, &summing{descs: []driver.Desc{{Remote: 5, Len: 10}}}))
	f.Add(sumBody(f, &summing{pages: &Pages{EntryLen: 16, Count: 2, RemoteBase: 1, RemoteStride: 50, Remote: []uint32{2, 0}}}))
	f.Add(sumBody(f, &summing{descs: []driver.Desc{{Remote: math.MaxUint64 - 3, Len: 10}}}))
	f.Add(sumBody(f, &summing{pages: &Pages{EntryLen: math.MaxUint64, Count: 2, RemoteBase: math.MaxUint64, RemoteStride: math.MaxUint64}}))
	f.Add(sumBody(f, &summing{pages: &Pages{EntryLen: 1, Count: 2, RemoteStride: 1 << 63, Remote: []uint32{2, math.MaxUint32}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		const size = 4096
		var r sumRequest
		if r.parse(b) != nil {
			return
		}
		for i := range min(r.count, 1<<10) {
			if off, n, ok := r.at(i, size); ok && (off > size || n > size-off) {
				t.Errorf("%d bytes at %d of %d", n, off, size)
			}
		}
	})
}

// Strangers' and peers' messages that make no sense are dropped, or answered with why.
func TestHostileSums(t *testing.T) {
	e := open(t, "owner")
	r := register(t, e, "kv", 4096)
	l := e.lanes[0]
	token, err := r.mems[0].AppendToken(nil)
	check(t, err)
	ask := func(token []byte, descs ...driver.Desc) error {
		s := &summing{descs: descs, way: &sumWay{far: make([]byte, 16)}}
		b, err := s.appendRequest(nil, token)
		check(t, err)
		answer := e.stager.sumFor(l, b[headBytes:], nil)
		if len(answer) == 1+4*len(descs) && answer[0] == 0 {
			return nil
		}
		return parseOutcome(answer)
	}
	check(t, ask(token, driver.Desc{Remote: 0, Len: 4096}, driver.Desc{Remote: 4095, Len: 1}))
	guess := append([]byte(nil), token...)
	guess[len(guess)-1] ^= 1
	for name, c := range map[string]struct {
		token []byte
		d     driver.Desc
	}{
		"past the end":    {token, driver.Desc{Remote: 4096, Len: 1}},
		"by an overflow":  {token, driver.Desc{Remote: math.MaxUint64, Len: 2}},
		"a guessed token": {guess, driver.Desc{Len: 1}},
		"no token":        {nil, driver.Desc{Len: 1}},
		"a foreign token": {make([]byte, 64), driver.Desc{Len: 1}},
	} {
		if err := ask(c.token, c.d); err == nil {
			t.Errorf("%s: was summed", name)
		}
	}
	id := e.stager.id
	for _, what := range []byte{isAuditHello, isAuditReady, isSum, isSummed, isAuditBye} {
		for n := range 40 {
			body := binary.LittleEndian.AppendUint64(appendHead(nil, id[:], what), 1)
			m := &driver.Message{From: "nobody", Data: append(body, make([]byte, n)...)[:headBytes+n]}
			if !e.stager.takes(l, m) {
				t.Fatal("the program was given a message of the engine's")
			}
		}
	}
	check(t, r.Close())
	if err := ask(token, driver.Desc{Len: 1}); err == nil {
		t.Error("a region that is closed was summed")
	}
}
