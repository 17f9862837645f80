// SPDX-License-Identifier: Apache-2.0

package ucx

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
		owner: session.NewOwner(), host: [8]byte{1, 2}, pid: 77,
		workers: [][]byte{{1}, bytes.Repeat([]byte{3}, 200)},
		hosts:   []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
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
	if _, err := decodeAddress(append([]byte("ucx9"), b[4:]...)); !errors.Is(err,
		driver.ErrVersion) {
		t.Errorf("another version: %v", err)
	}
}

func TestAddressTooLong(t *testing.T) {
	a := someAddress()
	a.workers = slices.Repeat(a.workers, 5)
	if b, err := a.encode(); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("%d bytes, %v, want %v", len(b), err, driver.ErrBounds)
	}
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
		if err != nil || !bytes.Equal(again, sealed(body)) {
			t.Errorf("%x is read as %+v, which is written %x (%v)", body, a, again, err)
		}
	})
}

// sealed closes what is to pass for an address with its digest.
func sealed(body []byte) []byte {
	sum := sha256.Sum256(body)
	return append(slices.Clone(body), sum[:addressCheck]...)
}
