// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"crypto/sha256"
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// CheckAddress checks that decode returns want for b, an encoding of session.EncodeAddress, refuses
// it when it is cut or has any bit flipped, and names another version of its mark as such.
func CheckAddress[T any](t *testing.T, want T, b []byte, mark string,
	decode func(b []byte) (T, error)) {
	t.Helper()
	if got, err := decode(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v, %v, want %+v", got, err, want)
	}
	for n := range b {
		if _, err := decode(b[:n:n]); err == nil {
			t.Errorf("cut to %d bytes: no error", n)
		}
	}
	for i := range 8 * len(b) {
		damaged := slices.Clone(b)
		damaged[i/8] ^= 1 << (i % 8)
		if _, err := decode(damaged); err == nil {
			t.Errorf("bit %d flipped: no error", i)
		}
	}
	other := slices.Clone(b)
	other[len(mark)-1]++
	if _, err := decode(other); !errors.Is(err, driver.ErrVersion) {
		t.Errorf("another version: %v", err)
	}
}

// SealAddress appends the digest of session.EncodeAddress to bytes that need not be an address.
func SealAddress(body []byte) []byte {
	sum := sha256.Sum256(body)
	return append(slices.Clone(body), sum[:8]...)
}

// CheckMessage checks that decode returns want for b, an encoding of session.AppendMessage of at
// most the given length. Unless the message takes all that follows as its last field, decode must
// refuse it when it is cut or followed by a byte.
func CheckMessage[T any](t *testing.T, want T, b []byte, most int, takesRest bool,
	decode func(b []byte) (T, error)) {
	t.Helper()
	if got, err := decode(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%T is read as %+v, %v, want %+v", want, got, err, want)
	}
	if len(b) > most {
		t.Errorf("%T of %d bytes", want, len(b))
	}
	if !takesRest {
		for n := range b {
			if _, err := decode(b[:n:n]); !errors.Is(err, driver.ErrCorrupt) {
				t.Errorf("%T cut to %d of %d bytes: %v", want, n, len(b), err)
			}
		}
		if _, err := decode(append(b, 0)); !errors.Is(err, driver.ErrCorrupt) {
			t.Errorf("%T and a byte: %v", want, err)
		}
	}
	version, kind := slices.Clone(b), slices.Clone(b)
	version[0]++
	if _, err := decode(version); !errors.Is(err, driver.ErrVersion) {
		t.Errorf("%T of another version: %v", want, err)
	}
	kind[1] = 99
	if _, err := decode(kind); !errors.Is(err, driver.ErrCorrupt) {
		t.Errorf("%T of another kind: %v", want, err)
	}
}
