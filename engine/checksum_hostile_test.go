// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/crc"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// TestHostileSums sends messages that make no sense: they are dropped, or answered with why.
func TestHostileSums(t *testing.T) {
	e := open(t, "owner")
	r := register(t, e, "kv", 4096)
	l := e.lanes[0]
	token, err := r.mems[0].AppendToken(nil)
	check(t, err)
	ask := func(token []byte, descs ...driver.Desc) error {
		b, err := exchange.AppendSum(nil, token, descs, nil)
		check(t, err)
		answer := e.stager.sumFor(l, exchange.SumBody(b), nil)
		if len(answer) == 1+4*len(descs) && answer[0] == 0 {
			return nil
		}
		return exchange.ParseOutcome(answer)
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
			if forProgram != (kind == exchange.IsNotification) {
				t.Fatalf("the program was given a message of kind %d", kind)
			}
		}
	}
	check(t, r.Close())
	if err := ask(token, driver.Desc{Len: 1}); err == nil {
		t.Error("a region that is closed was summed")
	}
}

// TestChecksumOfAChangedList: a list that the program changes while it is posted is an error, and
// not a look outside the region.
func TestChecksumOfAChangedList(t *testing.T) {
	r := register(t, open(t, "owner"), "kv", 4096)
	s := &summing{local: r, op: Write, pages: &Pattern{Run: 64, Count: 2,
		Local: Side{Stride: 64, List: []uint32{0, 1 << 31}}}}
	theirs := binary.LittleEndian.AppendUint32(nil, crc.Checksum(r.Bytes()[:64]))
	require.ErrorIs(t, s.compare(append(theirs, 0, 0, 0, 0), "peer"), ErrBounds)
}

// TestRefusedRemoteIsNotListed: another peer's Remote that Add has refused is not in the list, in
// which a checksum looks for the token that it shows to this one.
func TestRefusedRemoteIsNotListed(t *testing.T) {
	a, x, y := open(t, "a"), open(t, "x"), open(t, "y")
	local := register(t, a, "r", 64)
	register(t, x, "r", 64)
	register(t, y, "r", 64)
	px, py := connect(t, a, x), connect(t, a, y)
	tr := transfer(t, px, Write)
	check(t, tr.Checksum())
	check(t, tr.Add(local, 0, remote(t, px, "r"), 0, 64))
	require.ErrorIs(t, tr.Add(local, 0, remote(t, py, "r"), 0, 64), ErrNoRoute)
	require.Equal(t, []*Remote{remote(t, px, "r")}, tr.remotes)
	run(t, tr)
}
