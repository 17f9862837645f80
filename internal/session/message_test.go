// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

func TestMessageReader(t *testing.T) {
	r := ReadMessage([]byte{1, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1, 9})
	if a, b, c, d, e := r.Uint8(), r.Uint16(), r.Uint32(), r.Uint64(), r.Flag(); a != 1 || b != 2 ||
		c != 3 || d != 4 || !e {
		t.Errorf("read %d %d %d %d %v", a, b, c, d, e)
	}
	if r.Done() || r.Rest() != 1 || r.Bytes(1)[0] != 9 || !r.Done() {
		t.Error("the last byte")
	}
	if r.Uint32() != 0 || r.Done() || !r.Failed() {
		t.Error("a field that is not there")
	}
	if r := ReadMessage([]byte{2}); r.Flag() || r.Done() {
		t.Error("a flag of 2")
	}
	if r := ReadMessage([]byte{1}); r.Bytes(-1) != nil || r.Done() {
		t.Error("a negative count")
	}
}

func TestStatus(t *testing.T) {
	for s, err := range statusErrors {
		if StatusOf(err) != Status(s) || Status(s).Err() != err {
			t.Errorf("status %d and %v do not belong together", s, err)
		}
	}
	if StatusOf(errors.New("something else")) != StatusFailed ||
		Status(200).Err() != driver.ErrCorrupt {
		t.Error("what is unknown must be an error")
	}
}
