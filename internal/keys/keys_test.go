// SPDX-License-Identifier: Apache-2.0

package keys

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/backends"
)

func TestToken(t *testing.T) {
	owner, other := Owner{1}, Owner{2} // always the same: the check is short enough to fit by chance
	for _, want := range []Token{
		{Key: 0, Epoch: 1, Size: 1},
		{Secret: [16]byte{1, 2, 3}, Key: Limit - 1, Epoch: math.MaxUint64, Size: math.MaxUint64},
	} {
		b := want.Append([]byte("x"), &owner)[1:]
		if len(b) > backends.TokenMax || !bytes.HasPrefix(b, want.Secret[:]) {
			t.Errorf("token %x", b)
		}
		if got, err := Decode(b, &owner); err != nil || got != want {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
		if _, err := Decode(b, &other); !errors.Is(err, backends.ErrBadToken) {
			t.Errorf("another backend's: %v", err)
		}
		for n := range b {
			if _, err := Decode(b[:n:n], &owner); !errors.Is(err, backends.ErrBadToken) {
				t.Errorf("cut to %d: %v", n, err)
			}
		}
		for i := range 8 * len(b) {
			forged := slices.Clone(b)
			forged[i/8] ^= 1 << (i % 8)
			if _, err := Decode(forged, &owner); !errors.Is(err, backends.ErrBadToken) {
				t.Errorf("bit %d turned over: %v", i, err)
			}
		}
	}
}

func TestTable(t *testing.T) {
	table := Table[int]{Most: 3}
	var keys []uint32
	for i := range 3 {
		key, epoch, err := table.Take()
		if err != nil || key != uint32(i) || epoch != 1 {
			t.Fatalf("take %d: key %d, epoch %d, %v", i, key, epoch, err)
		}
		table.Put(key, new(int))
		keys = append(keys, key)
	}
	if _, _, err := table.Take(); !errors.Is(err, backends.ErrFull) {
		t.Errorf("a fourth Key: %v", err)
	}
	table.Remove(keys[1])
	if table.At(keys[1]) != nil || table.At(keys[2]) == nil || table.At(99) != nil {
		t.Error("the table finds what is not there, or not what is")
	}
	table.GiveBack(keys[1], 7)
	if key, epoch, err := table.Take(); key != keys[1] || epoch != 7 || err != nil {
		t.Errorf("take again: key %d, epoch %d, %v", key, epoch, err)
	}
	if n := len(table.All()); n != 2 {
		t.Errorf("%d memories, want 2", n)
	}
}
