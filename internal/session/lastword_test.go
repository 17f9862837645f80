// SPDX-License-Identifier: Apache-2.0

package session

import (
	"slices"
	"testing"
)

func TestLastWords(t *testing.T) {
	var l LastWords[int]
	if l.Disarm() || l.Arm() {
		t.Error("an empty list is armed, or has somebody")
	}
	l.Add(1)
	l.Add(2)
	if !l.Disarm() || l.Disarm() || !l.Arm() {
		t.Error("one wake-up for each Arm, and none is missed")
	}
	pending := l.Pending([]int{0})
	if !slices.Equal(pending, []int{0, 1, 2}) {
		t.Errorf("pending %v", pending)
	}
	l.Add(3)
	l.Drop(2)
	if got := l.Pending(nil); !slices.Equal(got, []int{3}) {
		t.Errorf("after two were told %v", got)
	}
}
