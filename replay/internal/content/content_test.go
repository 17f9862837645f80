// SPDX-License-Identifier: Apache-2.0

package content

import (
	"bytes"
	"testing"
)

var checker Checker

func TestFillAndWantAgree(t *testing.T) {
	for _, n := range []uint64{1, 7, 8, 63, 64, 65, 8191, 8192, 8193, 512 * 788, 3*8192 + 5} {
		b := make([]byte, n)
		Fill(b, 42, 7, 0)
		if got, want := Digest(0, b), checker.Want(42, 7, n); got != want {
			t.Errorf("%d bytes: digest %08x, want %08x", n, got, want)
		}
	}
}

func TestPiecesAreThePartsOfALayer(t *testing.T) {
	whole := make([]byte, 4096)
	Fill(whole, 9, 3, 0)
	pieces := make([]byte, 4096)
	for off := 0; off < 4096; off += 1000 { // 1000 is a multiple of 8, not of 64
		Fill(pieces[off:min(off+1000, 4096)], 9, 3, uint64(off))
	}
	if !bytes.Equal(whole, pieces) {
		t.Error("a layer filled in pieces differs from one filled at once")
	}
	crc := Digest(Digest(0, whole[:1000]), whole[1000:])
	if crc != checker.Want(9, 3, 4096) {
		t.Error("a digest over pieces differs from that of the whole")
	}
}

func TestDifferencesShow(t *testing.T) {
	const n = 66 << 10
	want := checker.Want(1, 0, n)
	good := make([]byte, n)
	change := map[string]func(b []byte){
		"another block": func(b []byte) { Fill(b, 2, 0, 0) },
		"another layer": func(b []byte) { Fill(b, 1, 1, 0) },
		"shifted":       func(b []byte) { Fill(b, 1, 0, 8) },
		"one bit":       func(b []byte) { b[n-1] ^= 1 },
		"two pages change": func(b []byte) {
			Fill(b[4096:8192], 1, 0, 0)
			Fill(b[:4096], 1, 0, 4096)
		},
		"stale tail": func(b []byte) { Poison(b[n-64:]) },
	}
	for name, f := range change {
		Fill(good, 1, 0, 0)
		f(good)
		if Digest(0, good) == want {
			t.Errorf("%s: same digest", name)
		}
	}
}

func TestPoison(t *testing.T) {
	b := make([]byte, 10001)
	if Poisoned(b) {
		t.Error("zeroes are taken for poison")
	}
	Poison(b)
	if !Poisoned(b) {
		t.Error("poison is not known again")
	}
	for _, i := range []int{0, 4096, 10000} {
		b[i]++
		if Poisoned(b) {
			t.Errorf("byte %d was written and not seen", i)
		}
		b[i]--
	}
}

const layerBytes = 512 * 788

func BenchmarkFill(b *testing.B) {
	buf := make([]byte, 64<<20)
	b.SetBytes(layerBytes)
	off := 0
	for b.Loop() {
		Fill(buf[off:off+layerBytes], 1, 1, 0)
		if off += layerBytes; off+layerBytes > len(buf) {
			off = 0
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	buf := make([]byte, 64<<20)
	b.SetBytes(layerBytes)
	off := 0
	for b.Loop() {
		if checker.Want(1, 1, layerBytes) == Digest(0, buf[off:off+layerBytes]) {
			b.Fatal("zeroes have the digest of a block")
		}
		if off += layerBytes; off+layerBytes > len(buf) {
			off = 0
		}
	}
}
