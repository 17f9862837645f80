// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSymbols looks for names that the linker has passed over: go-nvml's flags have it do so for
// the whole program, and a function missing from csrc would be found out when it is called.
func TestSymbols(t *testing.T) {
	f, err := elf.Open(binary)
	require.NoError(t, err)
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	if err != nil {
		if f.Section(".dynsym") == nil {
			return // without cgo there are none
		}
		t.Fatal(err)
	}
	for _, s := range symbols {
		if s.Version == "" && !strings.HasPrefix(s.Name, "nvml") {
			t.Errorf("nothing defines %s", s.Name)
		}
	}
	if flags, _ := f.DynValue(elf.DT_FLAGS); len(flags) > 0 &&
		elf.DynFlag(flags[0])&elf.DF_BIND_NOW != 0 {
		t.Error("all names are bound at start: those of NVML cannot be, and the program " +
			"does not start")
	}
}
