// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// encoder is what all control messages have in common.
type encoder interface{ encode() []byte }

func someControl() []encoder {
	return []encoder{
		&hello{conn: 3, worker: 2, to: session.NewOwner(), grace: 5, from: bytes.Repeat([]byte{7},
			driver.AddrMax)},
		&welcome{conn: 4, grace: 6},
		&welcome{conn: 4, status: session.StatusFull},
		&bye{conn: 5, from: session.NewOwner(), abandoned: true}, &bye{conn: 6},
		farewell{}, quit{},
		&importRequest{id: 1, key: 2, epoch: 3, secret: [16]byte{4}},
		&importAnswer{id: 1001, readOnly: true, size: 2, ticket: 3},
		&importAnswer{id: 1002, status: session.StatusRevoked},
	}
}

func TestControl(t *testing.T) {
	for _, want := range someControl() {
		b := want.encode()
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
	if _, err := decodeControl([]byte{controlVersion + 1, kindQuit}); !errors.Is(err,
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
		f.Add(m.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeControl(b)
		if err != nil {
			return
		}
		if again := m.(encoder).encode(); !bytes.Equal(again, b) {
			t.Errorf("%x is read as %+v, which is written %x", b, m, again)
		}
	})
}
