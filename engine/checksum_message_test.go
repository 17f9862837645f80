// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// request writes one as a peer of ours would, and returns what follows the tag.
func sumBody(t testing.TB, s *summing) []byte {
	t.Helper()
	b, err := s.appendRequest(nil, []byte("a token of some bytes"))
	check(t, err)
	return b[1+sumTagBytes:]
}

func TestSumRequests(t *testing.T) {
	pages := &Pattern{Run: 16, Count: 3, Remote: Side{Base: 100, Stride: 50,
		List: []uint32{2, 0, 1}}}
	plain := &Pattern{Run: 16, Count: 2, Remote: Side{Base: 100, Stride: 50}}
	for name, c := range map[string]struct {
		s    *summing
		want [][2]uint64
	}{
		"descriptors": {&summing{descs: []driver.Desc{{Remote: 5, Len: 10},
			{Remote: 500, Len: 1}}}, [][2]uint64{{5, 10}, {500, 1}}},
		"a listed one":    {&summing{pages: pages}, [][2]uint64{{200, 16}, {100, 16}, {150, 16}}},
		"one that is not": {&summing{pages: plain}, [][2]uint64{{100, 16}, {150, 16}}},
	} {
		var r sumRequest
		check(t, r.parse(sumBody(t, c.s)))
		if r.count != len(c.want) || string(r.token) != "a token of some bytes" {
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
	f.Add(
		sumBody(f, &summing{pages: &Pattern{Run: 16, Count: 2, Remote: Side{Base: 1, Stride: 50,
			List: []uint32{2, 0}}}}))
	f.Add(sumBody(f, &summing{descs: []driver.Desc{{Remote: math.MaxUint64 - 3, Len: 10}}}))
	f.Add(sumBody(f, &summing{pages: &Pattern{Run: math.MaxUint64, Count: 2,
		Remote: Side{Base: math.MaxUint64, Stride: math.MaxUint64}}}))
	f.Add(
		sumBody(f,
			&summing{pages: &Pattern{Run: 1, Count: 2, Remote: Side{Stride: 1 << 63,
				List: []uint32{2, math.MaxUint32}}}}))
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
		s := &summing{descs: descs}
		b, err := s.appendRequest(nil, token)
		check(t, err)
		answer := e.stager.sumFor(l, b[1+sumTagBytes:], nil)
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
	for kind := range 256 {
		for n := range 40 {
			data := append([]byte{byte(kind)}, make([]byte, n)...)
			l.receiveMu.Lock()
			l.senders = map[uint64]*sender{1: {lane: l, conn: 1, gone: make(chan struct{})}}
			_, forProgram := l.take(&driver.Message{Conn: 1, Data: data})
			l.receiveMu.Unlock()
			if forProgram != (kind == isNotification) {
				t.Fatalf("the program was given a message of kind %d", kind)
			}
		}
	}
	check(t, r.Close())
	if err := ask(token, driver.Desc{Len: 1}); err == nil {
		t.Error("a region that is closed was summed")
	}
}
