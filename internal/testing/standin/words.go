// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"os"
	"regexp"
	"strings"
)

var declaration = regexp.MustCompile(`_Atomic unsigned ([\w,\s]+);`)

// WordsOf reads the words of a panel from the header that declares struct panel.
func WordsOf(header string) ([]string, error) {
	text, err := os.ReadFile(header)
	if err != nil {
		return nil, err
	}
	_, body, _ := strings.Cut(string(text), "struct panel {")
	body, _, _ = strings.Cut(body, "\n};")
	var words []string
	for _, m := range declaration.FindAllStringSubmatch(body, -1) {
		words = append(words, strings.Fields(strings.ReplaceAll(m[1], ",", " "))...)
	}
	return words, nil
}
