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

	ucp "github.com/sluicehq/sluice/csrc/ucx"
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
	f.Add(b[:len(b)-8])
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
	return append(slices.Clone(body), sum[:8]...)
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
		b := encodeControl(want)
		got, err := decodeControl(b)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
		if len(b) > ucp.ControlMax {
			t.Errorf("%T of %d bytes", want, len(b))
		}
		if _, variable := want.(*hello); variable {
			continue
		}
		for n := range b {
			if _, err := decodeControl(b[:n:n]); !errors.Is(err, driver.ErrCorrupt) {
				t.Errorf("%T cut to %d of %d bytes: %v", want, n, len(b), err)
			}
		}
		if _, err := decodeControl(append(b, 0)); !errors.Is(err, driver.ErrCorrupt) {
			t.Errorf("%T and a byte: %v", want, err)
		}
	}
	if _, err := decodeControl([]byte{controlVersion + 1, kindBye}); !errors.Is(err,
		driver.ErrVersion) {
		t.Errorf("another version: %v", err)
	}
	if _, err := decodeControl([]byte{controlVersion, 99}); !errors.Is(err, driver.ErrCorrupt) {
		t.Errorf("another kind: %v", err)
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
