// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/pool"
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

func TestOffersReadBack(t *testing.T) {
	ask := offer{request: 5, fingerprint: math.MaxUint64,
		hashes: []pool.Hash{{1}, {}, pool.HashOf(3)}}
	got, err := decodeOffer(ask.append(nil))
	if err != nil || !reflect.DeepEqual(got, ask) {
		t.Errorf("offer %+v, %v", got, err)
	}
	missing, err := decodeAnswer(appendAnswer(nil, []int{0, 4}), 5)
	if err != nil || !slices.Equal(missing, []int{0, 4}) {
		t.Errorf("answer: %v", err)
	}
	for what, bad := range map[string][]int{
		"a block twice": {1, 1}, "blocks backwards": {2, 1}, "a block too far": {5},
	} {
		if _, err := decodeAnswer(appendAnswer(nil, bad), 5); !errors.Is(err,
			engine.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
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

func FuzzOffers(f *testing.F) {
	f.Add((&offer{hashes: make([]pool.Hash, 2)}).append(nil))
	f.Add(appendAnswer(nil, []int{0, 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ask, err := decodeOffer(b); err == nil && !bytes.Equal(ask.append(nil), b) {
			t.Errorf("offer %x was read as %+v", b, ask)
		}
		if missing, err := decodeAnswer(b, 8); err == nil && !bytes.Equal(appendAnswer(nil,
			missing), b) {
			t.Errorf("answer %x was read as %+v", b, missing)
		}
	})
}
