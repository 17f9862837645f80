// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"strings"
	"testing"
)

func TestNoteOfABusyMachine(t *testing.T) {
	for want, after := range map[string]Processors{
		"":                                 {all: 20, used: 10, own: 9.5},
		"others took 40 % of its":          {all: 20, used: 10, own: 2},
		"the host gave it 5 % less (steal": {all: 20, used: 10, own: 10, stolen: 1},
	} {
		got := after.Busy(Processors{})
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if ReadProcessors().all <= 0 {
		t.Error("the processors have passed no time")
	}
}
