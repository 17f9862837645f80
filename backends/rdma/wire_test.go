// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func someAddress() address {
	return address{
		owner: session.Owner{1, 2, 3}, host: [8]byte{4}, process: 77, notifs: 64,
		control: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:4791"),
			netip.MustParseAddrPort("[fd00::1]:1")},
		rails: []railAddress{railIn("10.0.0.1", 24, true), railIn("fe80::1", 0, false)},
	}
}

func TestAddress(t *testing.T) {
	a := someAddress()
	b, err := a.encode()
	require.NoError(t, err)
	testkit.CheckAddress(t, a, b, addressMark, decodeAddress)
}

// TestLargestAddress has as many rails and addresses as there can be.
func TestLargestAddress(t *testing.T) {
	a := someAddress()
	a.rails = slices.Repeat(a.rails[:1], railsMax)
	a.control = slices.Repeat(a.control[:1], controlsMax)
	if b, err := a.encode(); err != nil || len(b) > driver.AddrMax {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	a.rails = append(a.rails, a.rails[0])
	if b, err := a.encode(); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("%d rails: %d bytes, %v", len(a.rails), len(b), err)
	}
}

// FuzzDecodeAddress adds the digest itself, which would refuse nearly all bytes.
func FuzzDecodeAddress(f *testing.F) {
	a := someAddress()
	b, _ := a.encode()
	f.Add(b[:len(b)-8])
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := decodeAddress(testkit.SealAddress(body))
		if err != nil {
			return
		}
		again, err := a.encode()
		require.NoError(t, err)
		if b, err := decodeAddress(again); err != nil || !reflect.DeepEqual(a, b) ||
			len(again) != len(body)+8 {
			t.Errorf("%x is read as %+v, which is written %x (%v)", body, a, again, err)
		}
		if len(body) > 0 && bytes.Equal(again, body) {
			t.Error("an address without its digest")
		}
	})
}

func encoded(m session.Message) []byte { return appendMessage(nil, m) }

func someEnd(n byte) verbs.End {
	return verbs.End{QueuePair: 0x010203, Packet: 7, LID: 5, MTU: 5, Reads: 16, LinkLayer: 2,
		GID: [16]byte{n}}
}

func someControl() []session.Message {
	return []session.Message{
		&hello{to: session.Owner{1}, from: bytes.Repeat([]byte{2}, 1000),
			pairs: []pairOffer{{0, someEnd(1)}, {3, someEnd(2)}}},
		&welcome{status: session.StatusFull}, &welcome{pairs: []pairAnswer{{true, someEnd(1)}, {}}},
		&importRequest{id: 1, key: 2, epoch: 3, secret: [16]byte{4}},
		&importAnswer{id: 1, status: session.StatusRevoked}, &importAnswer{id: 1, readOnly: true,
			base: 1 << 40, size: 5, keys: []uint32{6, 0}},
		&expired{key: 1, epoch: 2}, &pairRequest{pair: 1, attempt: 2},
		&pairRequest{pair: 1, attempt: 2, pairAnswer: pairAnswer{true, someEnd(3)}},
		&pairReply{pair: 1, attempt: 2, seen: 3}, &pairReply{pair: 1, attempt: 2, seen: 3,
			pairAnswer: pairAnswer{true, someEnd(4)}},
		&broken{3}, &bye{}, &bye{abandoned: true}, farewell, quit, ping, pong,
		&answer{data: []byte{}}, &answer{data: bytes.Repeat([]byte{5}, messageMax)},
		&answersTaken{count: 1 << 40},
	}
}

func TestControl(t *testing.T) {
	for _, want := range someControl() {
		testkit.CheckMessage(t, want, encoded(want), controlMax, false, decodeControl)
	}
}

// FuzzControl wants one encoding for each message, and nothing else accepted.
func FuzzControl(f *testing.F) {
	for _, m := range someControl() {
		f.Add(encoded(m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeControl(b)
		if err != nil {
			return
		}
		if again := encoded(m); !bytes.Equal(again, b) {
			t.Errorf("%x is read as %+v, which is written %x", b, m, again)
		}
	})
}

// TestAddressHasTheVersionOfTheControl: an older backend then refuses the address, in words, and
// does not dial again and again.
func TestAddressHasTheVersionOfTheControl(t *testing.T) {
	require.Equal(t, fmt.Sprint("rdma", controlVersion), addressMark)
}
