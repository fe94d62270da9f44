{{- define "singletree.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "singletree.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "singletree.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "singletree.engineName" -}}
{{ include "singletree.fullname" . }}-engine
{{- end -}}

{{- define "singletree.secretName" -}}
{{- .Values.existingSecret | default (include "singletree.fullname" .) -}}
{{- end -}}

{{/* Whether the chart starts engines. */}}
{{- define "singletree.startsEngines" -}}
{{- if and .Values.engines.vllm.enabled (not .Values.engines.urls) -}}yes{{- end -}}
{{- end -}}

{{/* Addresses of the engines, joined by commas: .scheme and .port, for .root. Each pod of the StatefulSet has a name. */}}
{{- define "singletree.engineAddresses" -}}
{{- $name := include "singletree.engineName" .root -}}
{{- $addresses := list -}}
{{- range $number := until (int .root.Values.engines.vllm.replicas) -}}
{{- $addresses = append $addresses (printf "%s://%s-%d.%s.%s.svc:%d" $.scheme $name $number $name $.root.Release.Namespace (int $.port)) -}}
{{- end -}}
{{- $addresses | toJson -}}
{{- end -}}

{{- define "singletree.gracePeriod" -}}
{{- $least := add (int .Values.server.drainSeconds) (int .Values.server.preStopSeconds) -}}
{{- $period := .Values.server.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $period -}}
{{- add $least 15 -}}
{{- else -}}
{{- if le (int $period) (int $least) -}}
{{- fail (printf "server.terminationGracePeriodSeconds is %d: it must be longer than drainSeconds and preStopSeconds together, %d, or turns are cut" (int $period) (int $least)) -}}
{{- end -}}
{{- int $period -}}
{{- end -}}
{{- end -}}
