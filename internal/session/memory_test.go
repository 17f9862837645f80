// SPDX-License-Identifier: Apache-2.0

package session

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

func TestToken(t *testing.T) {
	// always the same: the check is short enough to fit by chance
	owner, other := Owner{1}, Owner{2}
	for _, want := range []Token{
		{Key: 0, Epoch: 1, Size: 1},
		{Secret: [16]byte{1, 2, 3}, Key: KeyLimit - 1, Epoch: math.MaxUint64, Size: math.MaxUint64},
	} {
		b := want.Append([]byte("x"), &owner)[1:]
		if len(b) > driver.TokenMax || !bytes.HasPrefix(b, want.Secret[:]) {
			t.Errorf("token %x", b)
		}
		if got, err := DecodeToken(b, &owner); err != nil || got != want {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
		if _, err := DecodeToken(b, &other); !errors.Is(err, driver.ErrBadToken) {
			t.Errorf("another backend's: %v", err)
		}
		for n := range b {
			if _, err := DecodeToken(b[:n:n], &owner); !errors.Is(err, driver.ErrBadToken) {
				t.Errorf("cut to %d: %v", n, err)
			}
		}
		for i := range 8 * len(b) {
			forged := slices.Clone(b)
			forged[i/8] ^= 1 << (i % 8)
			if _, err := DecodeToken(forged, &owner); !errors.Is(err, driver.ErrBadToken) {
				t.Errorf("bit %d turned over: %v", i, err)
			}
		}
	}
}

func TestKeyTable(t *testing.T) {
	table := KeyTable[int]{Most: 3}
	var keys []uint32
	for i := range 3 {
		key, epoch, err := table.Take()
		if err != nil || key != uint32(i) || epoch != 1 {
			t.Fatalf("take %d: key %d, epoch %d, %v", i, key, epoch, err)
		}
		table.Put(key, new(int))
		keys = append(keys, key)
	}
	if _, _, err := table.Take(); !errors.Is(err, driver.ErrFull) {
		t.Errorf("a fourth Key: %v", err)
	}
	table.Free(keys[1])
	if table.At(keys[1]) != nil || table.At(keys[2]) == nil || table.At(99) != nil {
		t.Error("the table finds what is not there, or not what is")
	}
	if key, epoch, err := table.Take(); key != keys[1] || epoch != 2 || err != nil {
		t.Errorf("take again: key %d, epoch %d, %v", key, epoch, err)
	}
	if n := len(table.All()); n != 2 {
		t.Errorf("%d memories, want 2", n)
	}
}

func TestImports(t *testing.T) {
	var i Imports[int]
	values := []*int{new(int), new(int), new(int)}
	for want, v := range values {
		if key, err := i.Add(v); err != nil || key != uint32(want) {
			t.Fatalf("key %d, %v, want %d", key, err, want)
		}
	}
	if i.At(3) != nil || i.Drop(3) != nil || i.At(1) != values[1] {
		t.Error("a key names what it does not stand for")
	}
	if i.Drop(1) != values[1] || i.Drop(1) != nil || i.At(1) != nil {
		t.Error("a key that was dropped names something")
	}
	if i.Replace(1, values[1], values[0]) || !i.Replace(2, values[2], values[0]) ||
		i.At(2) != values[0] {
		t.Error("replaced what was dropped, or not what was there")
	}
	if key, err := i.Add(values[1]); err != nil || key != 1 {
		t.Errorf("key %d, %v, want the one that came free", key, err)
	}
}

func TestImportsAreBounded(t *testing.T) {
	i := Imports[int]{list: make([]*int, KeyLimit)}
	if _, err := i.Add(new(int)); !errors.Is(err, driver.ErrFull) {
		t.Errorf("one more than all keys: %v", err)
	}
}
