// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
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
	got, err := decodeAddress(b)
	if err != nil || !reflect.DeepEqual(got, a) {
		t.Fatalf("%+v, %v, want %+v", got, err, a)
	}
	for n := range b {
		if _, err := decodeAddress(b[:n:n]); err == nil {
			t.Errorf("cut to %d bytes: no error", n)
		}
	}
	for i := range 8 * len(b) {
		damaged := slices.Clone(b)
		damaged[i/8] ^= 1 << (i % 8)
		if _, err := decodeAddress(damaged); err == nil {
			t.Errorf("bit %d turned over: no error", i)
		}
	}
	if _, err := decodeAddress(append([]byte("rdma9"), b[5:]...)); !errors.Is(err,
		driver.ErrVersion) {
		t.Errorf("another version: %v", err)
	}
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

// sealed closes what is to pass for an address with its digest.
func sealed(body []byte) []byte {
	sum := sha256.Sum256(body)
	return append(slices.Clone(body), sum[:addressCheck]...)
}

// FuzzDecodeAddress takes the digest away as an obstacle.
func FuzzDecodeAddress(f *testing.F) {
	a := someAddress()
	b, _ := a.encode()
	f.Add(b[:len(b)-addressCheck])
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := decodeAddress(sealed(body))
		if err != nil {
			return
		}
		again, err := a.encode()
		require.NoError(t, err)
		if b, err := decodeAddress(again); err != nil || !reflect.DeepEqual(a, b) ||
			len(again) != len(body)+addressCheck {
			t.Errorf("%x is read as %+v, which is written %x (%v)", body, a, again, err)
		}
		if len(body) > 0 && bytes.Equal(again, body) {
			t.Error("an address without its digest")
		}
	})
}
