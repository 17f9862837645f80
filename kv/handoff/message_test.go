// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

func TestRefusesBrokenMessages(t *testing.T) {
	for name, b := range groupMessages() {
		refuses := func(what string, b []byte, want error) {
			t.Helper()
			m, err := decode(b)
			require.ErrorIs(t, err, want, "%s: %s", name, what)
			require.Zero(t, m.kind, "%s: %s", name, what)
		}
		shortest := headerLen
		if name == "begin" || name == "grant" {
			shortest = fragmentLen + 1
		}
		for n := range shortest {
			refuses("cut", b[:n], engine.ErrCorrupt)
		}
		change := func(at int, by byte) []byte {
			changed := bytes.Clone(b)
			changed[at] ^= by
			return changed
		}
		refuses("to the other side", change(0, toSender^toReceiver), engine.ErrCorrupt)
		refuses("of another version", change(1, 0xFF), engine.ErrVersion)
		refuses("with a reason that does not fit", change(3, 0x80), engine.ErrCorrupt)
		if name == "abort" || name == "end" {
			refuses("and a byte more", append(bytes.Clone(b), 0), engine.ErrCorrupt)
		}
	}
}

func TestFragmentsMustFollowEachOther(t *testing.T) {
	part := func(total, offset uint32, n int) *message {
		return &message{total: total, offset: offset, bytes: make([]byte, n)}
	}
	for what, c := range map[string]struct {
		before []*message
		bad    *message
	}{
		"a start behind the start":  {nil, part(9, 3, 3)},
		"a whole over the bound":    {nil, part(101, 0, 3)},
		"a gap":                     {[]*message{part(9, 0, 3)}, part(9, 4, 3)},
		"a repetition":              {[]*message{part(9, 0, 3)}, part(9, 0, 3)},
		"another total":             {[]*message{part(9, 0, 3)}, part(8, 3, 3)},
		"a fragment behind the end": {[]*message{part(3, 0, 3)}, part(3, 3, 0)},
	} {
		var a assembly
		for _, m := range c.before {
			if _, err := a.add(m, 100); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := a.add(c.bad, 100); !errors.Is(err, engine.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, b := range groupMessages() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b)
		if err != nil {
			return
		}
		// What is accepted has one encoding: its own.
		again := appendHeader(nil, b[0], m.kind, m.reason, m.session)
		switch m.kind {
		case kindLayer:
			again = binary.LittleEndian.AppendUint32(again, m.layer)
		case kindBegin, kindGrant:
			again = append(again, b[headerLen:fragmentLen]...)
		}
		again = append(again, m.bytes...)
		if !bytes.Equal(again, b) {
			t.Errorf("%x was read as %+v", b, m)
		}
	})
}

func TestReasonsHaveWords(t *testing.T) {
	var words []string
	for r := Aborted; int(r) < len(reasons); r++ {
		if !r.valid() {
			continue
		}
		words = append(words, r.String())
		if err := (&EndError{Reason: r}); r != Failed && reasonOf(err) != r {
			t.Errorf("the error of reason %v has reason %v", r, reasonOf(err))
		}
	}
	slices.Sort(words)
	if len(slices.Compact(words)) != len(reasons)-2 || slices.Contains(words, "") {
		t.Errorf("%q", words)
	}
}

// TestMuxDealsOut: what is not of this package goes to the program, if that wants it.
func TestMuxDealsOut(t *testing.T) {
	j := leasedByLayer(t, 1, newMem)
	from, to := j.c.from[0], j.c.to[0]
	got := make(chan string, 8)
	to.mux.HandleRest(func(n engine.Notification) { got <- string(n.Data) })
	require.NoError(t, from.peers[0].Notify(within(t), []byte("x1")))
	require.Equal(t, "x1", <-got)
	j.begin(t)
	j.push(t)
	j.check(t)
	require.Empty(t, got)
}
