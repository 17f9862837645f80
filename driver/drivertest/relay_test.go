// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
)

// TestRelay sends every error through a pipe: it must be recognised behind it,
// and not be taken for another.
func TestRelay(t *testing.T) {
	for name, sent := range sentinels {
		line, err := json.Marshal(reply{Err: relay(fmt.Errorf("revoke: %w", sent))})
		if err != nil {
			t.Fatal(err)
		}
		var got reply
		if err := json.Unmarshal(line, &got); err != nil {
			t.Fatal(err)
		}
		if got.Err == nil || got.Err.Error() != "revoke: "+sent.Error() {
			t.Errorf("%s arrived as %v", name, got.Err.orNil())
		}
		for other, is := range sentinels {
			if errors.Is(got.Err.orNil(), is) != errors.Is(sent, is) {
				t.Errorf("%s arrived as %q: %v, want %v", name, other, errors.Is(got.Err, is),
					errors.Is(sent, is))
			}
		}
	}
	if relay(nil).orNil() != nil {
		t.Error("no error arrived as one")
	}
}
