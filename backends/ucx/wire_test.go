// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func someAddress() address {
	return address{
		owner: session.NewOwner(), host: [8]byte{1, 2}, pid: 77,
		workers: [][]byte{{1}, bytes.Repeat([]byte{3}, 200)},
		hosts:   []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
	}
}

func TestAddress(t *testing.T) {
	a := someAddress()
	b, err := a.encode()
	require.NoError(t, err)
	testkit.CheckAddress(t, a, b, addressMark, decodeAddress)
}

func TestAddressTooLong(t *testing.T) {
	a := someAddress()
	a.workers = slices.Repeat(a.workers, 5)
	if b, err := a.encode(); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("%d bytes, %v, want %v", len(b), err, driver.ErrBounds)
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
		if err != nil || !bytes.Equal(again, testkit.SealAddress(body)) {
			t.Errorf("%x is read as %+v, which is written %x (%v)", body, a, again, err)
		}
	})
}

func someControl() []session.Message {
	return []session.Message{
		&hello{conn: 3, worker: 2, to: session.NewOwner(), grace: 5, from: bytes.Repeat([]byte{7},
			driver.AddrMax)},
		&welcome{conn: 4, grace: 6},
		&welcome{conn: 4, status: session.StatusFull},
		&bye{conn: 5, from: session.NewOwner(), abandoned: true}, &bye{conn: 6},
		&importRequest{id: 1, key: 2, epoch: 3, secret: [16]byte{4}},
		&importAnswer{id: 1001, readOnly: true, size: 2, ticket: 3},
		&importAnswer{id: 1002, status: session.StatusRevoked},
	}
}

func TestControl(t *testing.T) {
	for _, want := range someControl() {
		_, takesRest := want.(*hello)
		testkit.CheckMessage(t, want, encodeControl(want), ucp.ControlMax, takesRest,
			decodeControl)
	}
}

// FuzzControl wants one encoding for each message, and nothing else accepted.
func FuzzControl(f *testing.F) {
	for _, m := range someControl() {
		f.Add(encodeControl(m))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeControl(b)
		if err != nil {
			return
		}
		if again := encodeControl(m); !bytes.Equal(again, b) {
			t.Errorf("%x is read as %+v, which is written %x", b, m, again)
		}
	})
}
