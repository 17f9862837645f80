// SPDX-License-Identifier: Apache-2.0

package limits

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

func TestDefault(t *testing.T) {
	n, d, name := 0, 3*time.Second, ""
	Default(&n, 7)
	Default(&d, time.Minute)
	Default(&name, "x")
	if n != 7 || d != 3*time.Second || name != "x" {
		t.Errorf("%d, %v, %q: want what was zero set, and the rest as it was", n, d, name)
	}
}

func TestWithin(t *testing.T) {
	for _, v := range []int{1, 5, 9} {
		if err := Within("Threads", v, 1, 9); err != nil {
			t.Error(err)
		}
	}
	for _, v := range []int{-1, 0, 10} {
		err := Within("Threads", v, 1, 9)
		if want := fmt.Sprintf("Threads %d is not within 1 to 9", v); !errors.Is(err,
			driver.ErrBounds) || !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v", v, err)
		}
	}
}
