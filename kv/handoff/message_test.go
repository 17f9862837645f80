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

// messages are one of each kind, well formed.
func messages() map[string][]byte {
	fragment := func(to byte, k kind) []byte {
		return append(appendHeader(nil, to, k, 0, 7), 9, 0, 0, 0, 2, 0, 0, 0, 'a', 'b', 'c')
	}
	return map[string][]byte{
		"begin": fragment(toReceiver, kindBegin), "grant": fragment(toSender, kindGrant),
		"abort": appendHeader(nil, toReceiver, kindAbort, Aborted, 7),
		"end":   appendHeader(nil, toSender, kindEnd, Failed, 7),
	}
}

func TestDecodesItsOwnMessages(t *testing.T) {
	for name, b := range messages() {
		m, err := decode(b)
		if err != nil || m.session != 7 {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
		switch name {
		case "begin", "grant":
			if m.total != 9 || m.offset != 2 || string(m.bytes) != "abc" {
				t.Errorf("%s: %+v", name, m)
			}
		}
	}
}

func TestRefusesBrokenMessages(t *testing.T) {
	for name, b := range messages() {
		for n := range b {
			if _, err := decode(b[:n]); !errors.Is(err, engine.ErrCorrupt) &&
				(name != "begin" && name != "grant" || n <= fragmentLen) {
				t.Errorf("%s cut to %d bytes: %v", name, n, err)
			}
		}
		swapped := bytes.Clone(b)
		swapped[0] ^= toSender ^ toReceiver
		if _, err := decode(swapped); !errors.Is(err, engine.ErrCorrupt) {
			t.Errorf("%s to the other side: %v", name, err)
		}
		newer := bytes.Clone(b)
		newer[1]++
		if _, err := decode(newer); !errors.Is(err, engine.ErrVersion) {
			t.Errorf("%s of another version: %v", name, err)
		}
		reason := bytes.Clone(b)
		reason[3] ^= 0x80
		if _, err := decode(reason); !errors.Is(err, engine.ErrCorrupt) {
			t.Errorf("%s with a reason that does not fit: %v", name, err)
		}
		if name != "begin" && name != "grant" {
			if _, err := decode(append(bytes.Clone(b), 0)); !errors.Is(err, engine.ErrCorrupt) {
				t.Errorf("%s and a byte more: %v", name, err)
			}
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
	for _, list := range []map[string][]byte{messages(), groupMessages()} {
		for _, b := range list {
			f.Add(b)
		}
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
